"""How many steps a killed generation made that the next one must make again."""

from dataclasses import replace

import pytest
from places import Place

from elastic_mnist.snapshots.progress import ProgressFile


def test_lost_steps_are_those_between_snapshot_and_mark(at_step_5: Place) -> None:
    """Killed at step 11 with a snapshot of step 5, a run makes 6 steps again."""
    at_step_5.progress(at_step_5.decide(), 11)
    start = at_step_5.decide()
    assert (start.num_lost_steps, start.record.num_lost_steps) == (6, 6)


def test_lost_steps_add_up_over_generations(at_step_5: Place) -> None:
    """6 steps lost and then 3 are 9, in the record."""
    at_step_5.progress(at_step_5.decide(), 11)
    at_step_5.progress(at_step_5.decide(), 8)
    start = at_step_5.decide()
    assert (start.num_lost_steps, start.record.num_lost_steps) == (3, 9)


def test_steps_lost_before_the_first_snapshot_are_counted(place: Place) -> None:
    """A run killed at step 4 with no snapshot makes 4 steps again."""
    place.progress(place.decide(), 4)
    assert place.decide().num_lost_steps == 4


def test_a_run_killed_right_after_a_snapshot_lost_nothing(at_step_5: Place) -> None:
    """The mark says what the snapshot says."""
    at_step_5.progress(at_step_5.decide(), 5)
    assert at_step_5.decide().num_lost_steps == 0


def test_without_a_mark_the_lost_steps_are_not_known(at_step_5: Place) -> None:
    """None, and the record's count stays."""
    start = at_step_5.decide()
    assert (start.num_lost_steps, start.record.num_lost_steps) == (None, 0)


def test_the_mark_of_an_earlier_generation_is_not_believed(at_step_5: Place) -> None:
    """A generation that left no mark of its own has lost an unknown number of steps."""
    first = at_step_5.decide()
    at_step_5.decide()
    at_step_5.progress(first, 11)
    assert at_step_5.decide().num_lost_steps is None


def test_the_mark_of_another_run_is_not_believed(at_step_5: Place) -> None:
    """A mark with another name says nothing of this run."""
    start = at_step_5.decide()
    ProgressFile(at_step_5.progress_path, replace(start.record, run_id="another")).set(11)
    assert at_step_5.decide().num_lost_steps is None


@pytest.mark.parametrize("content", [b"", b"x", b"a b c d\n", b"\xff\xff\xff"])
def test_a_damaged_mark_is_done_without(content: bytes, at_step_5: Place) -> None:
    """The lost steps are not known, and the run goes on."""
    at_step_5.progress_path.write_bytes(content)
    assert at_step_5.decide().num_lost_steps is None

"""Durable snapshots in the background: what is written, told, tried again and given up."""

import re
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import tenacity
from harness import eventually
from structlog.testing import capture_logs

from elastic_mnist.errors import Fenced, StoreError, TrainingError, UsageError
from elastic_mnist.snapshots import writer
from elastic_mnist.snapshots.writer import BackgroundWriter, Write

PAUSES = {name: getattr(writer, name) for name in ("_FIRST_PAUSE_SECONDS", "_LONGEST_PAUSE_SECONDS")}


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a failed write be tried again at once."""
    monkeypatch.setattr(writer, "_FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(writer, "_LONGEST_PAUSE_SECONDS", 0.0)


@pytest.fixture
def events() -> Iterator[list[Any]]:
    """What is told."""
    with capture_logs() as told:
        yield told


def write_of(step: int, run: Callable[[], None]) -> Write:
    """Return a snapshot's write."""
    return Write(step=step, path=f"step-{step}", run=run)


class Failing:
    """A write that fails a number of times."""

    def __init__(self, num_failures: int, error: Exception | None = None) -> None:
        self._num_failures = num_failures
        self._error = error or StoreError("disk full")
        self.num_tries = 0

    def __call__(self) -> None:
        """Fail, or succeed."""
        self.num_tries += 1
        if self.num_tries <= self._num_failures:
            raise self._error


def test_a_write_runs_in_another_thread() -> None:
    """Whoever hands a snapshot over does not write it."""
    threads: list[threading.Thread] = []
    background = BackgroundWriter(max_failures=0)
    background.submit(write_of(1, lambda: threads.append(threading.current_thread())))
    background.flush()
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


def test_the_training_goes_on_while_a_snapshot_is_written(events: list[Any]) -> None:
    """With one being written and one waiting, a third takes the place of the second, which is told; none overlap."""
    begun, go_on, written = threading.Event(), threading.Event(), []

    def slow() -> None:
        begun.set()
        assert go_on.wait(60)
        written.append(1)

    background = BackgroundWriter(max_failures=0)
    background.submit(write_of(1, slow))
    assert begun.wait(60)
    for step in (2, 3):
        background.submit(write_of(step, lambda step=step: written.append(step)))  # type: ignore[misc]
        background.check()
    assert written == []
    go_on.set()
    background.flush()
    assert written == [1, 3]
    (told,) = events
    assert (told["event"], told["step"], told["path"]) == ("snapshot.superseded", 2, "step-2")


def test_settling_waits_for_what_was_handed_over() -> None:
    """It returns after the last write and not before."""
    go_on, written = threading.Event(), []

    def slow() -> None:
        assert go_on.wait(60)
        written.append(1)

    background = BackgroundWriter(max_failures=0)
    background.submit(write_of(1, slow))
    flushed = threading.Thread(target=background.flush)
    flushed.start()
    flushed.join(0.05)
    assert flushed.is_alive()
    go_on.set()
    flushed.join(60)
    assert (flushed.is_alive(), written) == (False, [1])


def test_settling_with_nothing_to_write_returns() -> None:
    """Other ranks than 0 never hand anything over."""
    BackgroundWriter(max_failures=0).flush()


def test_a_failed_write_is_told_and_tried_again(events: list[Any]) -> None:
    """One that fails twice and then succeeds has not failed; each failure is told with its reason."""
    failing, background = Failing(2), BackgroundWriter(max_failures=0)
    background.submit(write_of(7, failing))
    background.flush()
    assert failing.num_tries == 3
    assert [(event["event"], event["log_level"], event["step"], event["reason"]) for event in events] == 2 * [
        ("snapshot.retried", "warning", 7, "disk full")
    ]


def test_the_pauses_between_the_tries_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second, one, two: as many as there are further tries, and none after the last."""
    for name, seconds in PAUSES.items():
        monkeypatch.setattr(writer, name, seconds)
    pauses: list[float] = []
    monkeypatch.setattr(tenacity.nap, "time", SimpleNamespace(sleep=pauses.append))
    failing = Failing(10**6)
    with pytest.raises(StoreError, match="disk full"):
        writer.with_retries(write_of(7, failing))
    assert (pauses, failing.num_tries) == ([0.5, 1.0, 2.0], 4)


def test_the_last_snapshot_must_not_fail(events: list[Any]) -> None:
    """Whatever number of failures is allowed, settling raises where the newest snapshot could not be written."""
    failing, background = Failing(10**6), BackgroundWriter(max_failures=100)
    background.submit(write_of(7, failing))
    with pytest.raises(TrainingError, match=r"^the last snapshot could not be saved: disk full$"):
        background.flush()
    assert failing.num_tries == 4
    assert [event["event"] for event in events] == [*["snapshot.retried"] * 3, "snapshot.failed"]


def wait_until_failed(background: BackgroundWriter, events: list[Any], num_failed: int) -> None:
    """Wait until a number of snapshots has failed."""
    eventually(lambda: sum(event["event"] == "snapshot.failed" for event in events) >= num_failed)
    background.close()


@pytest.mark.parametrize("max_failures", [0, 1, 3])
def test_too_many_failures_in_a_row_stop_the_training(max_failures: int, events: list[Any]) -> None:
    """As many as allowed are borne; one more raises at the next look, with the option's name."""
    background = BackgroundWriter(max_failures=max_failures)
    for number in range(max_failures):
        background.submit(write_of(number, Failing(10**6)))
        wait_until_failed(background, events, number + 1)
        background.check()
    background.submit(write_of(max_failures, Failing(10**6)))
    wait_until_failed(background, events, max_failures + 1)
    with pytest.raises(UsageError, match=f"--max_snapshot_failures allows {max_failures}: disk full$"):
        background.check()


def test_a_good_snapshot_makes_up_for_failed_ones(events: list[Any]) -> None:
    """Failures count in a row only."""
    background = BackgroundWriter(max_failures=1)
    for number in range(3):
        background.submit(write_of(number, Failing(10**6)))
        wait_until_failed(background, events, number + 1)
        background.submit(write_of(number, Failing(0)))
        background.flush()
    background.check()


@pytest.mark.parametrize("error", [Fenced("taken over"), RuntimeError("our bug")])
def test_what_a_retry_cannot_help_is_raised_at_once(error: Exception, events: list[Any]) -> None:
    """A claim that is lost, or any error but the store's, reaches the thread that trains after one try."""
    failing, background = Failing(10**6, error), BackgroundWriter(max_failures=100)
    background.submit(write_of(7, failing))
    with pytest.raises(type(error), match=str(error)):
        background.flush()
    with pytest.raises(type(error), match=str(error)):
        background.check()
    assert (failing.num_tries, events) == (1, [])


class Hanging:
    """A write that does not end until it is told to."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self._may_end = threading.Event()

    def __call__(self) -> None:
        """Hang."""
        self.has_begun.set()
        assert self._may_end.wait(60)

    def end(self) -> None:
        """Let it end well."""
        self._may_end.set()


@pytest.fixture
def hanging() -> Iterator[Callable[[BackgroundWriter, int], Hanging]]:
    """Hand over a write that hangs, and wait until it does; after the test it ends."""
    begun: list[Hanging] = []

    def begin(background: BackgroundWriter, step: int) -> Hanging:
        begun.append(Hanging())
        background.submit(write_of(step, begun[-1]))
        assert begun[-1].has_begun.wait(60)
        return begun[-1]

    yield begin
    for write in begun:
        write.end()


class Clock:
    """A clock that the test sets forward."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """Return what time it is."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The writer's clock."""
    clock = Clock()
    monkeypatch.setattr(writer, "time", clock)
    return clock


def test_settling_gives_up_on_a_write_that_hangs(hanging: Callable[[BackgroundWriter, int], Hanging]) -> None:
    """It raises when its time is up, whatever number of failures is allowed; once that one is written, it returns."""
    background = BackgroundWriter(max_failures=100)
    write = hanging(background, 7)
    with pytest.raises(TrainingError, match=r"^the last snapshot could not be saved within 0 s$"):
        background.flush(0.01)
    write.end()
    background.flush()


def failed(events: list[Any]) -> list[int]:
    """Return the steps of the snapshots that were told to have failed."""
    return [event["step"] for event in events if event["event"] == "snapshot.failed"]


def test_a_write_that_hangs_counts_as_a_failed_one_again_and_again(
    hanging: Callable[[BackgroundWriter, int], Hanging], clock: Clock, events: list[Any]
) -> None:
    """Each time that it has taken as long as a write may take it is told once; one time too many stops the training."""
    background = BackgroundWriter(max_failures=2)
    hanging(background, 7)
    for num_failed in (1, 2):
        clock.now += writer._LONGEST_SECONDS - 1
        background.check()
        assert failed(events) == [7] * (num_failed - 1)
        clock.now += 1
        for _ in range(2):
            background.check()
            assert failed(events) == [7] * num_failed
    clock.now += writer._LONGEST_SECONDS
    reason = "step-7: the write has not ended within 600 s"
    message = f"3 snapshots in a row could not be saved, --max_snapshot_failures allows 2: {reason}"
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        background.check()
    assert [(event["step"], event["path"], event["reason"]) for event in events] == 3 * [(7, "step-7", reason)]


def test_a_write_that_ends_after_all_makes_up_for_its_hanging(
    hanging: Callable[[BackgroundWriter, int], Hanging], clock: Clock, events: list[Any]
) -> None:
    """As many failures as are allowed are borne again after it."""
    background = BackgroundWriter(max_failures=2)
    for step in (7, 8):
        write = hanging(background, step)
        for _ in range(2):
            clock.now += writer._LONGEST_SECONDS
            background.check()
        write.end()
        background.flush()
    background.check()
    assert failed(events) == [7, 7, 8, 8]


def test_only_the_time_of_a_write_itself_counts(
    hanging: Callable[[BackgroundWriter, int], Hanging], clock: Clock, events: list[Any]
) -> None:
    """However long ago the one before began, and with nothing to write for ever so long, nothing has failed."""
    background = BackgroundWriter(max_failures=0)
    for step in (7, 8):
        clock.now += 10 * writer._LONGEST_SECONDS
        background.check()
        write = hanging(background, step)
        clock.now += writer._LONGEST_SECONDS - 1
        background.check()
        write.end()
        background.flush()
    assert events == []

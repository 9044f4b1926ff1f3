"""Where a generation goes on from: every case of a start."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from places import HOLDER, Place
from states import Fault, FaultyStorage, small_state
from structlog.testing import capture_logs

from elastic_mnist.errors import StoreError, UsageError
from elastic_mnist.snapshots import record as run_record
from elastic_mnist.snapshots.durable import DurableTier
from elastic_mnist.snapshots.progress import LastProgress, ProgressFile
from elastic_mnist.snapshots.resume import Start
from elastic_mnist.snapshots.resume_sources import Candidate
from elastic_mnist.snapshots.state import pack, position_of


def test_an_empty_place_gives_a_fresh_start(place: Place) -> None:
    """Nothing recorded, no snapshot: a new run, from nothing."""
    start = place.decide()
    assert (start.source, start.path, start.data, start.state()) == ("fresh", None, None, None)
    assert (start.record.generation, start.num_lost_steps, start.finished) == (0, 0, None)


def test_a_fresh_start_claims_its_place(place: Place) -> None:
    """The record is written before the first step."""
    assert place.decide().record == place.record()


def test_two_runs_have_different_names(tmp_path: Path) -> None:
    """Two fresh starts at two places are two runs."""
    assert Place(tmp_path / "a").decide().record.run_id != Place(tmp_path / "b").decide().record.run_id


def test_a_fresh_start_fixes_the_global_batch_size(place: Place) -> None:
    """Samples per process times the world size of that moment."""
    assert place.decide(world_size=3).record.contract["global_batch_size"] == 24


def test_a_global_batch_size_that_is_asked_for_is_taken(place: Place) -> None:
    """It does not depend on the world size."""
    assert place.decide(world_size=3, global_batch_size=20).record.contract["global_batch_size"] == 20


@pytest.mark.parametrize(("device_type", "size"), [("cpu", 64), ("cuda", 512)])
def test_a_fresh_start_fixes_the_micro_batch_size(device_type: str, size: int, place: Place) -> None:
    """The default of the device of that moment, also for a later life on another one."""
    assert place.decide(device_type=device_type).record.contract["micro_batch_size"] == size
    assert place.decide(device_type="cpu").record.contract["micro_batch_size"] == size


def test_a_run_killed_before_its_first_snapshot_goes_on_as_the_same_run(place: Place) -> None:
    """Its name is kept, and its generation counted."""
    first, second = place.decide(), place.decide()
    assert (second.source, second.data) == ("fresh", None)
    assert second.record == replace(first.record, generation=1, reached=0)
    assert place.record() == second.record


def test_a_run_killed_before_its_first_snapshot_keeps_its_global_batch_size(place: Place) -> None:
    """The world of the first start decides, not that of the second."""
    place.decide(world_size=3)
    assert place.decide(world_size=2).record.contract["global_batch_size"] == 24


def test_other_settings_before_the_first_snapshot_are_refused_too(place: Place) -> None:
    """The job that claimed the place may be at work, and about to save: another one is turned away."""
    first = place.decide()
    with pytest.raises(UsageError, match=r"seed was 0 and is now 1; .*--accept_changes$"):
        place.decide(seed=1)
    second = place.decide(seed=1, accept_changes=True)
    assert second.record.run_id == first.record.run_id
    assert (second.record.generation, second.record.contract["seed"]) == (1, 1)


def test_the_newest_snapshot_is_gone_on_from(at_step_5: Place) -> None:
    """Source, path and bytes are those of the snapshot."""
    run_id = at_step_5.record().run_id
    at_step_5.commit(7, run_id=run_id)
    start = at_step_5.decide()
    assert (start.source, start.path) == ("storage", f"{at_step_5.directory}/step-00000007.pt")
    assert start.data == pack(small_state(7, run_id=run_id))


def test_a_resumed_run_is_the_same_run(at_step_5: Place) -> None:
    """Name, start and contract are kept, and the generation is counted and written down."""
    before = at_step_5.record()
    start = at_step_5.decide(world_size=4)
    assert start.record == at_step_5.record() == replace(before, generation=1, began_at=5)


def test_generations_are_counted_on(at_step_5: Place) -> None:
    """Three more starts are generations 1, 2 and 3."""
    assert [at_step_5.decide().record.generation for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_finished_run_has_nothing_left_to_do(epochs: int, tmp_path: Path) -> None:
    """At or beyond the epochs asked for, with its end told, the final manifest is what there is, and no state."""
    place = Place.finished(tmp_path)
    start = place.decide(epochs=epochs)
    assert start.finished == DurableTier(place.storage).manifests()[0]
    assert (start.data, start.finished.epoch) == (None, 2)


def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    """No byte and no time of change differs, of a file or of the directory."""
    place = Place.finished(tmp_path)
    before = place.files()
    assert place.decide(epochs=2).finished is not None
    assert place.files() == before


def test_a_run_killed_before_its_last_word_goes_on_to_say_it(tmp_path: Path) -> None:
    """With its last snapshot saved and its end not told, it is one more generation, which claims the place."""
    place = Place.at_step(tmp_path, 26)
    before = place.record()
    start = place.decide(epochs=2)
    assert (start.finished, start.source) == (None, "storage")
    assert start.data == pack(small_state(26, run_id=before.run_id))
    assert start.record == place.record() == replace(before, generation=1, began_at=26)


def test_more_epochs_are_harmless(tmp_path: Path) -> None:
    """A finished run that is asked for more goes on from its last snapshot, and is not finished any more."""
    place = Place.finished(tmp_path)
    before = place.record()
    start = place.decide(epochs=3)
    assert (start.finished, start.source) == (None, "storage")
    assert start.data == pack(small_state(26, run_id=before.run_id))
    assert start.record == place.record() == replace(before, generation=1, is_finished=False, began_at=26)


def test_a_finished_run_that_lost_its_snapshots_still_has_a_state(place: Place, tmp_path: Path) -> None:
    """Begun from a copy of a finished snapshot, its own ones gone, it ends or goes on, but never without weights."""
    copy = tmp_path / "best.pt"
    copy.write_bytes(pack(small_state(26)))
    place.decide(resume_from=str(copy), epochs=2)
    place.finish()
    start = place.decide(resume_from=str(copy), epochs=2)
    assert start.finished is not None or start.data == copy.read_bytes()


def test_a_lost_record_is_made_anew_from_the_snapshot(at_step_5: Place) -> None:
    """Without run.json the run keeps its name, contract and beginning, and counts on from the snapshot's generation."""
    before = at_step_5.record()
    at_step_5.storage.delete("run.json")
    start = at_step_5.decide(world_size=3)
    assert (start.record.run_id, start.record.contract) == (before.run_id, before.contract)
    assert (start.record.generation, start.record.started_at) == (1, small_state()["started_at"])


def test_a_lost_record_does_not_let_other_settings_in(at_step_5: Place) -> None:
    """The snapshot itself holds the contract."""
    at_step_5.storage.delete("run.json")
    with pytest.raises(UsageError, match="seed was 0 and is now 1"):
        at_step_5.decide(seed=1)


def test_anothers_record_is_not_believed(at_step_5: Place, tmp_path: Path) -> None:
    """Beside a run.json of another run the snapshot's own run goes on."""
    run_id = at_step_5.record().run_id
    at_step_5.storage.put(run_record.NAME, Place(tmp_path / "other").decide(seed=9).record.to_json())
    start = at_step_5.decide()
    assert (start.source, start.record.run_id, start.record.contract["seed"]) == ("storage", run_id, 0)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"{}", b"\xff\xfe", b'{"run_id": "x"}'])
def test_a_damaged_record_is_told_with_the_way_out(content: bytes, at_step_5: Place) -> None:
    """One line names the file; moved away, it is made anew and the run goes on."""
    at_step_5.storage.put("run.json", content)
    with pytest.raises(StoreError, match=f"^{at_step_5.directory}/run.json: damaged [^\n]+; move it away"):
        at_step_5.decide()
    (at_step_5.directory / "run.json").unlink()
    assert at_step_5.decide().source == "storage"


def test_where_all_snapshots_are_damaged_the_run_begins_again_as_itself(at_step_5: Place) -> None:
    """The same run, one generation on, from nothing and under its contract; also the next time."""
    before = at_step_5.record()
    (at_step_5.directory / "step-00000005.pt").write_bytes(b"")
    for generation in (1, 2):
        start = at_step_5.decide(world_size=2)
        assert (start.source, start.data) == ("fresh", None)
        assert start.record == replace(before, generation=generation, reached=0, num_stalled=generation - 1)


def test_where_all_snapshots_are_damaged_other_settings_are_refused(at_step_5: Place) -> None:
    """What is left of another job's snapshots is still that job's."""
    (at_step_5.directory / "step-00000005.pt").write_bytes(b"")
    for _ in range(2):
        with pytest.raises(UsageError, match="seed was 0 and is now 1"):
            at_step_5.decide(seed=1)


@pytest.mark.parametrize("operation", ["create", "put_if_match"])
def test_a_place_that_cannot_be_written_is_told_before_the_first_step(operation: str, at_step_5: Place) -> None:
    """Where the run cannot be claimed there is no start."""
    fault = Fault(at=0, of=(operation,), raises=StoreError("--snapshot_path: read-only"))
    with pytest.raises(StoreError, match="read-only"):
        at_step_5.decide(storage=FaultyStorage(at_step_5.storage, fault))
    assert fault.num_fired == 1


@pytest.mark.parametrize("operation", ["names", "get"])
def test_a_place_that_cannot_be_read_is_never_a_fresh_start(operation: str, at_step_5: Place) -> None:
    """An error of access anywhere ends the start, and writes nothing."""
    none = Fault(at=-1, of=(operation,), raises=StoreError("403"))
    at_step_5.decide(storage=FaultyStorage(at_step_5.storage, none))
    assert len(none.seen) > 0
    before = at_step_5.files()
    for at in range(len(none.seen)):
        fault = Fault(at=at, of=(operation,), raises=StoreError("403"))
        with pytest.raises(StoreError, match="403"):
            at_step_5.decide(storage=FaultyStorage(at_step_5.storage, fault))
        assert fault.num_fired == 1
    assert at_step_5.files() == before


def test_a_file_in_the_way_of_the_snapshots_is_a_store_error(place: Place) -> None:
    """A regular file where the directory should be is told with the option's name."""
    place.directory.write_bytes(b"")
    with pytest.raises(StoreError, match=f"^--snapshot_path {place.directory}: "):
        place.decide()


def offered(place: Place, step: int) -> Candidate:
    """Return what the node of rank 0 offers of its memory tier: the recorded generation's state of a step."""
    return Candidate(rank=0, record=place.record(), position=position_of(small_state(step)))


@pytest.fixture
def at_steps_3_and_5(tmp_path: Path) -> Place:
    """A place with a run's record and its snapshots of steps 3 and 5."""
    place = Place.at_step(tmp_path, 3)
    place.commit(5, run_id=place.record().run_id)
    return place


def test_a_snapshot_of_the_step_that_memory_holds_needs_no_second_one(at_steps_3_and_5: Place) -> None:
    """The memory is gone on from, what is saved is that step, and nothing is rejected."""
    with capture_logs() as events:
        start = at_steps_3_and_5.decide(candidates=[offered(at_steps_3_and_5, 5)])
    assert (start.source, start.state_rank, start.data) == ("memory", 0, None)
    assert start.saved == position_of(small_state(5))
    assert events == []


@pytest.mark.parametrize("num_evaluated_epochs", [0, 1])
def test_a_snapshot_of_an_epochs_end_without_its_evaluation_is_made_again(
    num_evaluated_epochs: int, tmp_path: Path
) -> None:
    """What memory holds may have it: a job that ends there is to leave a snapshot that tells its accuracy."""
    place = Place(tmp_path)
    progress = {"num_evaluated_epochs": num_evaluated_epochs}
    place.commit(13, run_id=place.decide().record.run_id, progress=progress)
    start = place.decide(candidates=[offered(place, 13)])
    assert start.source == "memory"
    assert start.saved == (position_of(small_state(13)) if num_evaluated_epochs else None)


@pytest.mark.parametrize("data", [b"", b"damaged", None], ids=["empty", "damaged", "missing"])
def test_a_damaged_snapshot_of_the_step_that_memory_holds_is_not_counted_upon(
    data: bytes | None, at_steps_3_and_5: Place
) -> None:
    """It is told as rejected, and what is saved is the one before: so that step will be saved again."""
    path = at_steps_3_and_5.directory / "step-00000005.pt"
    path.unlink() if data is None else path.write_bytes(data)
    with capture_logs() as events:
        start = at_steps_3_and_5.decide(candidates=[offered(at_steps_3_and_5, 5)])
    assert (start.source, start.saved) == ("memory", position_of(small_state(3)))
    assert [(event["event"], event["path"]) for event in events] == [("snapshot.rejected", str(path))]


def test_a_damaged_snapshot_that_cannot_be_set_aside_is_not_counted_upon_either(
    at_steps_3_and_5: Place,
) -> None:
    """In a store that lets nobody rename, too, what is saved is the one before."""
    (at_steps_3_and_5.directory / "step-00000005.pt").write_bytes(b"damaged")
    fault = Fault(at=None, of=("rename",), raises=StoreError("no renames today"))
    storage = FaultyStorage(at_steps_3_and_5.storage, fault)
    start = at_steps_3_and_5.decide(storage=storage, candidates=[offered(at_steps_3_and_5, 5)])
    assert fault.num_fired > 0
    assert (start.source, start.saved) == ("memory", position_of(small_state(3)))


def test_where_the_only_snapshot_is_damaged_memory_is_gone_on_from_and_nothing_is_saved(
    at_step_5: Place,
) -> None:
    """There is no older one to count upon."""
    (at_step_5.directory / "step-00000005.pt").write_bytes(b"damaged")
    start = at_step_5.decide(candidates=[offered(at_step_5, 5)])
    assert (start.source, start.saved) == ("memory", None)


def test_what_a_generation_that_was_over_saved_is_not_gone_on_from(at_step_5: Place) -> None:
    """Generation 1 went on from step 5 and saved 7; that of step 9, which 0 saved late, is told and set aside."""
    run_id = at_step_5.record().run_id
    assert at_step_5.decide().record.began_at == 5
    at_step_5.commit(7, run_id=run_id, generation=1)
    at_step_5.commit(9, run_id=run_id, generation=0)
    with capture_logs() as events:
        start = at_step_5.decide()
    assert (start.source, start.record.began_at) == ("storage", 7)
    late = f"{at_step_5.directory}/step-00000009.pt"
    assert [(event["event"], event["path"]) for event in events] == [("snapshot.rejected", late)]
    assert {"step-00000009.pt.rejected", "step-00000009.json.rejected"} < {*at_step_5.storage.names()}


def test_what_the_last_generation_saved_is_never_late(at_step_5: Place) -> None:
    """Step after step, each generation goes on from what the one before has saved, and nothing is rejected."""
    run_id = at_step_5.record().run_id
    for generation, step in enumerate((5, 7, 9, 11)):
        if generation:
            at_step_5.commit(step, run_id=run_id, generation=generation)
        with capture_logs() as events:
            start = at_step_5.decide()
        assert (start.path, events) == (f"{at_step_5.directory}/step-{step:08d}.pt", [])


def die_at_step_5(place: Place, start: Start) -> None:
    """Let a generation make steps up to 5, and die."""
    place.progress(start, 5)


def die_in_set_up(_place: Place, _start: Start) -> None:
    """Let a generation die before its first mark."""


def start_again_and_again(place: Place, die: Callable[[Place, Start], None]) -> None:
    """Let ten generations of one launch begin, and die."""
    for _ in range(10):
        die(place, place.decide())


@pytest.mark.parametrize("die", [die_at_step_5, die_in_set_up])
def test_generations_that_all_end_at_one_step_are_no_accident(
    die: Callable[[Place, Start], None], at_step_5: Place
) -> None:
    """Of one launch the fifth does not start, and says at which step the four before it have ended, marked or not."""
    at_step_5.progress(at_step_5.decide(), 6)  # one that came further
    for _ in range(4):
        die(at_step_5, at_step_5.decide())
    with pytest.raises(UsageError, match=r"^4 generations in a row have ended at step 5; .* start the job again$"):
        at_step_5.decide()


@pytest.mark.parametrize("die", [die_at_step_5, die_in_set_up])
def test_after_that_refusal_the_same_launch_may_try_again(
    die: Callable[[Place, Start], None], at_step_5: Place
) -> None:
    """A launch does not always have a name of its own: the record that the refusal leaves counts from 0."""
    with pytest.raises(UsageError, match="generations in a row have ended at step 5"):
        start_again_and_again(at_step_5, die)
    assert at_step_5.record().num_stalled == 0
    start = at_step_5.decide()
    assert (start.source, start.record.run_id) == ("storage", at_step_5.record().run_id)


def test_another_launch_may_try_at_the_same_step(at_step_5: Place) -> None:
    """Somebody has looked at it: as many deaths as under one name are no reason to refuse under many."""
    for number in range(10):
        at_step_5.decide(holder=replace(HOLDER, job_id=f"job {number}"))


def test_generations_that_make_progress_are_never_refused(at_step_5: Place) -> None:
    """Ten that die in set-up, each after one that has saved a step more, are ten accidents."""
    run_id = at_step_5.record().run_id
    for step in range(6, 16):
        at_step_5.decide()
        generation = at_step_5.decide().record.generation
        at_step_5.commit(step, run_id=run_id, generation=generation)


def interrupt(place: Place, num_times: int) -> None:
    """Let generations begin that are stopped before their first step, as for a node that joins."""
    for _ in range(num_times):
        place.stop(place.decide())


def test_generations_that_were_stopped_before_their_first_step_are_no_stall(place: Place) -> None:
    """Five joins and more, one after the other, while the job has not finished a step: the next one starts."""
    interrupt(place, 10)
    start = place.decide()
    assert (start.source, start.record.generation, start.record.num_stalled) == ("fresh", 10, 0)
    assert start.num_lost_steps == 0


def test_a_stop_neither_counts_as_a_failure_nor_hides_one(at_step_5: Place) -> None:
    """Four failures at one step, with joins before and between them: the next one is refused, and says four."""
    for _ in range(4):
        interrupt(at_step_5, 2)
        die_at_step_5(at_step_5, at_step_5.decide())
    with pytest.raises(UsageError, match=r"^4 generations in a row have ended at step 5"):
        at_step_5.decide()


def test_a_stop_after_progress_ends_a_stall(at_step_5: Place) -> None:
    """Three failures, then a generation that got further and was stopped there: it takes four failures again."""
    for _ in range(3):
        at_step_5.progress(at_step_5.decide(), 5)
    at_step_5.stop(at_step_5.decide(), 7)
    for _ in range(4):
        at_step_5.progress(at_step_5.decide(), 7)
    with pytest.raises(UsageError, match=r"^4 generations in a row have ended at step 7"):
        at_step_5.decide()


def test_a_step_after_a_stop_was_asked_for_is_progress(at_step_5: Place) -> None:
    """The progress file says both, whichever came first: how far it came, and that it did not fail."""
    start = at_step_5.decide()
    progress = ProgressFile(at_step_5.progress_path, start.record)
    progress.stop()
    assert ProgressFile.read(at_step_5.progress_path, start.record) == LastProgress(step=5, is_stopped=True)
    progress.set(6)
    assert ProgressFile.read(at_step_5.progress_path, start.record) == LastProgress(step=6, is_stopped=True)

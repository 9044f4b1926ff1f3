"""What is in a node's memory alone is saved by its agent, where the agent ends and its workers cannot save it."""

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from harness import SMALL, Job, contents, eventually, fault, free_port, plain, standalone, torchrun
from places import Place
from states import small_state
from structlog.testing import capture_logs

from elastic_mnist import events, processes
from elastic_mnist.errors import Fenced, StoreError
from elastic_mnist.settings import Settings
from elastic_mnist.snapshots import rescue
from elastic_mnist.snapshots.claim import Holder
from elastic_mnist.snapshots.durable import DurableTier
from elastic_mnist.snapshots.memory import MemoryTier
from elastic_mnist.snapshots.record import RunRecord
from elastic_mnist.tools import verify

OPTIONS = (
    *SMALL,
    "--dataset=synthetic",
    "--train_samples=2000",
    "--test_samples=60",
    "--epochs=1",
    "--save_every=0",
)
STOPPED_LINE = "elastic_mnist: stopped; the same command goes on from here"
OWN = Holder(job_id="job", host=processes.host(), pid=os.getpid(), pid_started=processes.started(os.getpid()))


@pytest.fixture(scope="module")
def undisturbed_sha256(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of the small job when nobody touches it."""
    directory = tmp_path_factory.mktemp("undisturbed")
    with Job(directory, directory, plain(), OPTIONS) as job:
        return str(job.finish()["weights_sha256"])


def check_goes_on(directory: Path, step: int, undisturbed_sha256: str) -> None:
    """Check that the same command goes on from a step without a loss, to the undisturbed weights."""
    with Job(directory, directory, standalone(1), OPTIONS) as job:
        assert job.finish()["weights_sha256"] == undisturbed_sha256
        (resumed,) = job.events("run.resumed")
        assert (resumed["source"], resumed["step"], resumed["num_lost_steps"]) == ("storage", step, 0)


def test_a_stop_of_a_worker_that_hangs_loses_nothing(tmp_path: Path, undisturbed_sha256: str) -> None:
    """SIGTERM to the agent of a worker that spins: all that was finished is saved, and the end is that of a stop."""
    environment, fired = fault(tmp_path, "spin", rank=1, step=5)
    with Job(tmp_path, tmp_path, standalone(2), OPTIONS, environment) as job:
        eventually(fired.exists)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(within=29) == 143  # the worker ends by itself, before the launcher's patience does
        assert "exitcode: -9" not in job.output
        failed = job.events("run.failed")
        assert failed
        assert all(event["reason"] == "SIGTERM: not stopped within 25 s" for event in failed)
        (stopped,) = job.events("run.stopped")
        assert (stopped["step"], stopped["reason"]) == (5, "SIGTERM; saved by the agent")
        assert verify.run(stopped["path"], None) == 0
        assert STOPPED_LINE in job.output
    check_goes_on(tmp_path, 5, undisturbed_sha256)


def test_a_stop_while_no_worker_is_there_loses_nothing(tmp_path: Path, undisturbed_sha256: str) -> None:
    """SIGTERM to an agent that waits for the next rendezvous, its worker just killed: what was finished is saved."""
    rendezvous = ("--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}", "--nnodes=2:2")
    line = (*rendezvous, "--max_restarts=3")  # the one that is left alone waits for a second one
    with Job(tmp_path, tmp_path, torchrun(*line), OPTIONS) as first:
        eventually(lambda: "elastic rendezvous" in first.output)
        with Job(tmp_path, tmp_path, torchrun(*line), OPTIONS) as second:
            first.wait_for_step(5)
            second.kill_all()
        eventually(lambda: not first.workers())
        reached = first.progress()[1]
        first.process.send_signal(signal.SIGTERM)
        assert first.wait(within=30) == 143
        (stopped,) = first.events("run.stopped")
        assert stopped["step"] >= reached
        assert verify.run(stopped["path"], None) == 0
        assert STOPPED_LINE in first.output
    check_goes_on(tmp_path, stopped["step"], undisturbed_sha256)


def test_a_launch_whose_restarts_are_spent_loses_nothing(tmp_path: Path, undisturbed_sha256: str) -> None:
    """A killed worker that is not replaced is a failure, and what was finished before it is saved."""
    environment, fired = fault(tmp_path, "kill", rank=0, step=5)
    with Job(tmp_path, tmp_path, standalone(1, max_restarts=0), OPTIONS, environment) as job:
        assert job.wait(within=60) == 1
        assert fired.exists()
        assert [event["step"] for event in job.events("snapshot.saved")] == [5]
    check_goes_on(tmp_path, 5, undisturbed_sha256)


@pytest.mark.slow
def test_a_stop_that_saves_nothing_is_no_stop_in_order(tmp_path: Path) -> None:
    """Where a worker hangs and there is no memory tier, the agent's end is a failure, and says what it means."""
    environment, fired = fault(tmp_path, "spin", rank=0, step=5)
    options = (*OPTIONS, "--memory_snapshot_every=0")
    with Job(tmp_path, tmp_path, standalone(1), options, environment) as job:
        eventually(fired.exists)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(within=60) == 1
        assert "error: stopped, and what came after the newest snapshot is not saved" in job.output
        assert STOPPED_LINE not in job.output


@pytest.fixture
def memory_path() -> Iterator[str]:
    """A memory as an agent holds it."""
    descriptor = os.memfd_create("test")
    yield f"/proc/{os.getpid()}/fd/{descriptor}"
    os.close(descriptor)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A place that this process's launch has claimed, with a snapshot of step 5."""
    monkeypatch.setattr(events, "configure", lambda *_, **__: None)
    place = Place(tmp_path)
    place.commit(5, run_id=place.decide(holder=OWN).record.run_id)
    return place


def save_held(place: Place, memory_path: str, record: RunRecord, step: int, *, reason: str | None = None) -> bool:
    """Let the memory hold a state, and save it as an agent does."""
    state = small_state(step, run_id=record.run_id, generation=record.generation, progress={"test_accuracy": None})
    MemoryTier(memory_path, record).put(state)
    return rescue.save_held(memory_path, Settings(snapshot_path=str(place.directory)), reason=reason)


def test_a_store_that_hangs_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An agent whose rescue does not come to an end says so after a while, and ends."""
    begun, go_on = threading.Event(), threading.Event()

    def save_for_ever(*_: object, **__: object) -> None:
        begun.set()
        go_on.wait(60)

    monkeypatch.setattr(rescue, "save_held", save_for_ever)
    monkeypatch.setattr(rescue, "_RESCUE_SECONDS", 0.2)
    assert not rescue.rescue("nowhere", Settings(), reason=None)
    assert begun.is_set()
    go_on.set()
    assert "what the node's memory holds cannot be saved: not within 0 s" in capsys.readouterr().err


def newest_step(place: Place) -> int:
    """Return the step of the newest snapshot."""
    newest = DurableTier(place.storage).newest_valid()
    assert newest is not None
    return int(newest.state["step"])


def test_what_is_held_is_saved_and_told(place: Place, memory_path: str) -> None:
    """The newer state is the newest snapshot then, and the stop is told as a worker tells it."""
    with capture_logs() as told:
        assert save_held(place, memory_path, place.record(), 9, reason="SIGTERM")
    assert newest_step(place) == 9
    *_, saved, stopped = told
    assert (saved["event"], saved["tier"], saved["step"]) == ("snapshot.saved", "storage", 9)
    assert (stopped["event"], stopped["reason"], stopped["step"]) == ("run.stopped", "SIGTERM", 9)
    assert stopped["path"] == f"{place.directory}/step-00000009.pt"


@pytest.mark.parametrize("step", [3, 5])
def test_what_a_snapshot_has_already_is_left_as_it_is(step: int, place: Place, memory_path: str) -> None:
    """A state of the newest snapshot's step, or of one before, is safe as it is; a stop tells of that snapshot."""
    before = contents(place.directory)
    with capture_logs() as told:
        assert save_held(place, memory_path, place.record(), step, reason="SIGTERM")
    assert contents(place.directory) == before
    assert (told[-1]["event"], told[-1]["step"]) == ("run.stopped", 5)
    assert told[-1]["path"] == f"{place.directory}/step-00000005.pt"


def test_a_damaged_snapshot_of_what_is_held_is_made_again(place: Place, memory_path: str) -> None:
    """A manifest alone does not make it safe."""
    (place.directory / "step-00000005.pt").write_bytes(b"damaged")
    assert save_held(place, memory_path, place.record(), 5)
    assert newest_step(place) == 5


def test_an_empty_memory_saves_nothing(place: Place, memory_path: str) -> None:
    """There is nothing that would be safe."""
    assert not rescue.save_held(memory_path, Settings(snapshot_path=str(place.directory)), reason=None)
    assert newest_step(place) == 5


def test_one_agent_alone_saves(place: Place, memory_path: str) -> None:
    """What another agent's worker has the claim for is that agent's to save."""
    before = contents(place.directory)
    others = replace(place.record(), holder={**place.record().holder, "pid": os.getppid()})
    assert save_held(place, memory_path, others, 9)
    assert contents(place.directory) == before


def test_a_generation_that_is_over_saves_nothing(place: Place, memory_path: str) -> None:
    """Where a later one has claimed the place, what this one holds is left alone."""
    mine = place.record()
    place.decide(holder=replace(OWN, pid=os.getppid()))
    before = contents(place.directory)
    with pytest.raises(Fenced):
        save_held(place, memory_path, mine, 9)
    assert contents(place.directory) == before


def test_a_store_that_is_away_is_told(place: Place, memory_path: str) -> None:
    """What cannot be saved is an error that names the place."""
    record = place.record()
    for path in place.directory.iterdir():
        path.unlink()
    place.directory.rmdir()
    place.directory.write_bytes(b"a file")
    with pytest.raises(StoreError, match=str(place.directory)):
        save_held(place, memory_path, record, 9)

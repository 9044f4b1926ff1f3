"""What is in a node's memory alone is saved by its agent, where the agent ends and its workers cannot save it."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import SMALL, Job, contents, eventually, fault, free_port, plain, standalone, torchrun
from places import Place
from states import small_state
from structlog.testing import capture_logs

from elastic_mnist.agent import emergency_save
from elastic_mnist.agent.emergency_save import Outcome
from elastic_mnist.agent.workers import Node
from elastic_mnist.cli import verify
from elastic_mnist.errors import StoreConflict, StoreError, UsageError
from elastic_mnist.ipc import environment, processes
from elastic_mnist.ipc.environment import STOP_SIGNALS
from elastic_mnist.settings import Settings
from elastic_mnist.snapshots import record as run_record
from elastic_mnist.snapshots.durable import DurableTier
from elastic_mnist.snapshots.holder import LeaseHolder
from elastic_mnist.snapshots.memory import MemoryTier
from elastic_mnist.snapshots.record import RunRecord
from elastic_mnist.snapshots.resume import MAX_STALLED
from elastic_mnist.snapshots.resume_sources import Candidate
from elastic_mnist.snapshots.storage import LocalStorage
from elastic_mnist.telemetry import events
from elastic_mnist.training.sampler import Position

OPTIONS = (
    *SMALL,
    "--dataset=synthetic",
    "--train_samples=2000",
    "--test_samples=60",
    "--epochs=1",
    "--save_every=0",
)
STOPPED_LINE = "elastic_mnist: stopped; the same command goes on from here"
OWN = LeaseHolder(job_id="job", host=processes.host(), pid=os.getpid(), pid_started=processes.started(os.getpid()))


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


def hold(memory_path: str, record: RunRecord, step: int) -> None:
    """Let the memory hold a state."""
    state = small_state(step, run_id=record.run_id, generation=record.generation, progress={"test_accuracy": None})
    MemoryTier(memory_path, record).put(state)


def save_held(
    place: Place,
    memory_path: str,
    record: RunRecord,
    step: int,
    *,
    reason: str | None = None,
    patience: float = 0.0,
) -> Outcome:
    """Let the memory hold a state, and save it as an agent does."""
    hold(memory_path, record, step)
    settings = Settings(snapshot_path=str(place.directory))
    return emergency_save.save_held(memory_path, settings, reason=reason, holder_seconds=patience)


def test_a_store_that_hangs_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An agent whose rescue does not come to an end says so after a while, and ends."""
    begun, go_on = threading.Event(), threading.Event()

    def save_for_ever(*_: object, **__: object) -> None:
        begun.set()
        go_on.wait(60)

    monkeypatch.setattr(emergency_save, "save_held", save_for_ever)
    monkeypatch.setattr(emergency_save, "_RESCUE_SECONDS", 0.2)
    assert emergency_save.rescue("nowhere", Settings(), reason=None, stands_in=True) is Outcome.LOST
    assert begun.is_set()
    go_on.set()
    assert "what the node's memory holds cannot be saved: not within 0 s" in capsys.readouterr().err


def newest_step(place: Place) -> int:
    """Return the step of the newest snapshot."""
    newest = DurableTier(place.storage).newest_valid()
    assert newest is not None
    return int(newest.state["step"])


def names(told: Sequence[MutableMapping[str, Any]]) -> list[str]:
    """Return what was told, less what the memory tier says for debugging."""
    return [event["event"] for event in told if event.get("tier") != "memory"]


def test_what_is_held_is_saved_and_told(place: Place, memory_path: str) -> None:
    """The newer state is the newest snapshot then, and the stop is told as a worker tells it."""
    with capture_logs() as told:
        assert save_held(place, memory_path, place.record(), 9, reason="SIGTERM") is Outcome.SAFE
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
        assert save_held(place, memory_path, place.record(), step, reason="SIGTERM") is Outcome.SAFE
    assert contents(place.directory) == before
    assert (told[-1]["event"], told[-1]["step"]) == ("run.stopped", 5)
    assert told[-1]["path"] == f"{place.directory}/step-00000005.pt"


def test_a_damaged_snapshot_of_what_is_held_is_made_again(place: Place, memory_path: str) -> None:
    """A manifest alone does not make it safe; that it is damaged is told once."""
    (place.directory / "step-00000005.pt").write_bytes(b"damaged")
    with capture_logs() as told:
        assert save_held(place, memory_path, place.record(), 5) is Outcome.SAFE
    assert names(told) == ["snapshot.rejected", "snapshot.saved"]
    assert newest_step(place) == 5


def test_an_empty_memory_saves_nothing(place: Place, memory_path: str) -> None:
    """There is nothing that would be safe."""
    settings = Settings(snapshot_path=str(place.directory))
    assert emergency_save.save_held(memory_path, settings, reason=None) is Outcome.EMPTY
    assert newest_step(place) == 5


def claimed_by(pid: int, place: Place) -> RunRecord:
    """Return the record as another agent's worker has claimed it, one of this host."""
    record = replace(place.record(), holder=replace(OWN, pid=pid, pid_started=processes.started(pid)))
    place.storage.put(run_record.NAME, record.to_json())
    return record


def test_one_agent_alone_saves_while_the_holder_can(place: Place, memory_path: str) -> None:
    """What another agent has the claim for is that one's to save, and to tell of: once it has, nothing is written."""
    others = claimed_by(os.getppid(), place)
    hold(memory_path, others, 9)
    settings = Settings(snapshot_path=str(place.directory))
    with ThreadPoolExecutor(1) as agent, capture_logs() as told:
        outcome = agent.submit(emergency_save.save_held, memory_path, settings, reason="SIGTERM", holder_seconds=60.0)
        place.commit(9, run_id=others.run_id)
        before = contents(place.directory)
        assert outcome.result(60) is Outcome.SAFE
    assert contents(place.directory) == before
    assert names(told) == ["snapshot.saved"]  # the holder's


@pytest.fixture
def other_agent() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this host that may stand for another launch, or another node."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_what_the_holder_does_not_save_another_agent_does(
    other_agent: subprocess.Popen[bytes], place: Place, memory_path: str
) -> None:
    """After a while; nothing of what the holder may be about to save is removed, and what is damaged is told twice."""
    record = claimed_by(other_agent.pid, place)
    place.commit(9, run_id=record.run_id)
    (place.directory / "step-00000009.pt").write_bytes(b"damaged")
    (place.directory / "step-00000007.pt").write_bytes(b"its manifest is on its way")
    with capture_logs() as told:
        assert save_held(place, memory_path, record, 9, reason="SIGTERM", patience=1.2) is Outcome.SAFE
    assert newest_step(place) == 9
    assert (place.directory / "step-00000007.pt").exists()
    assert (place.directory / "step-00000005.pt").exists()
    assert names(told) == ["snapshot.rejected"] * 2 + ["snapshot.saved", "run.stopped"]  # by the look, and set aside


@pytest.mark.parametrize("stands_in", [True, False])
def test_a_dead_holder_is_not_waited_for(
    *,
    stands_in: bool,
    other_agent: subprocess.Popen[bytes],
    place: Place,
    memory_path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it is seen that nobody else can save it, it is saved at once, whatever is said of the others."""
    monkeypatch.setattr(emergency_save, "_LOOK_SECONDS", -1)  # no sleep takes that
    record = claimed_by(other_agent.pid, place)
    other_agent.kill()
    other_agent.wait()
    hold(memory_path, record, 9)
    settings = Settings(snapshot_path=str(place.directory))
    assert emergency_save.save_held(memory_path, settings, reason=None, stands_in=stands_in) is Outcome.SAFE
    assert newest_step(place) == 9


def test_an_agent_that_leaves_the_job_to_others_does_not_wait_for_them(
    place: Place, memory_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for its end, and have in memory what it has; so it does not so much as look at the store."""
    monkeypatch.setattr(emergency_save, "open_storage", lambda _: pytest.fail("it was opened"))
    hold(memory_path, claimed_by(os.getppid(), place), 9)
    settings = Settings(snapshot_path=str(place.directory))
    assert emergency_save.save_held(memory_path, settings, reason=None, stands_in=False) is Outcome.SAFE


def test_an_agent_that_does_not_see_the_runs_snapshots_makes_none(place: Place, memory_path: str) -> None:
    """A node whose path is not the leader's says so; a run that began there would bar the way for the next one."""
    record = claimed_by(os.getppid(), place)
    hold(memory_path, record, 9)
    shutil.rmtree(place.directory)
    settings = Settings(snapshot_path=str(place.directory))
    with pytest.raises(UsageError, match=f"run {record.run_id} is not recorded there"):
        emergency_save.save_held(memory_path, settings, reason="SIGTERM", holder_seconds=0.0)
    assert not place.directory.exists()


def test_what_another_agent_saves_at_the_same_moment_is_not_lost(
    place: Place, memory_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes second at a write looks again, finds it saved, and leaves it to the other one to tell."""
    was_second: list[str] = []

    class Busy(LocalStorage):
        def put_if_match(self, name: str, data: bytes, etag: str | None) -> str:
            if name == run_record.NAME and not was_second:
                was_second.append(name)
                place.commit(9, run_id=place.record().run_id)
                raise StoreConflict(name)
            return super().put_if_match(name, data, etag)

    monkeypatch.setattr(emergency_save, "open_storage", lambda _: Busy(place.directory))
    hold(memory_path, place.record(), 9)
    with capture_logs() as told:
        outcome = emergency_save.save_held(memory_path, Settings(), reason="SIGTERM", holder_seconds=0.0)
    assert was_second
    assert outcome is Outcome.SAFE
    assert newest_step(place) == 9
    assert names(told)[0] == "snapshot.saved"  # the other one's


def test_what_a_later_generation_of_the_same_agent_did_not_reach_is_saved(place: Place, memory_path: str) -> None:
    """A generation that claimed the place and died before its first step has left no state; the one before has."""
    mine = place.record()
    hold(memory_path, mine, 9)
    offer = Candidate(rank=0, record=mine, position=Position(epoch=0, step=9, samples_in_epoch=72))
    assert place.decide(holder=OWN, candidates=[offer]).record.generation == mine.generation + 1
    assert save_held(place, memory_path, mine, 9) is Outcome.SAFE
    assert newest_step(place) == 9
    assert place.decide(holder=OWN).data is not None  # nothing of it is late for the next one


def test_a_job_that_gives_up_saves_what_it_has(place: Place, memory_path: str) -> None:
    """Where the last generations have all died at one step, that step is in a snapshot when the agent has ended."""
    mine = place.record()
    offer = Candidate(rank=0, record=mine, position=Position(epoch=0, step=9, samples_in_epoch=72))
    for _ in range(MAX_STALLED + 1):
        place.progress(place.decide(holder=OWN, candidates=[offer]), 9)
    with pytest.raises(UsageError, match="generations in a row have ended at step 9"):
        place.decide(holder=OWN, candidates=[offer])
    assert save_held(place, memory_path, mine, 9) is Outcome.SAFE
    assert newest_step(place) == 9


@pytest.mark.parametrize("is_dead", [False, True])
def test_what_a_generation_that_is_over_holds(
    *, is_dead: bool, other_agent: subprocess.Popen[bytes], place: Place, memory_path: str
) -> None:
    """Another agent's later generation has more, and is left alone; one that is seen to be dead has left nothing."""
    mine = place.record()
    offer = Candidate(rank=0, record=mine, position=Position(epoch=0, step=9, samples_in_epoch=72))
    other = replace(OWN, pid=other_agent.pid, pid_started=processes.started(other_agent.pid))
    assert place.decide(holder=other, candidates=[offer]).record.generation == mine.generation + 1
    if is_dead:
        other_agent.kill()
        other_agent.wait()
    before = contents(place.directory)
    assert save_held(place, memory_path, mine, 9) is Outcome.SAFE
    assert newest_step(place) == (9 if is_dead else 5)
    assert (contents(place.directory) == before) == (not is_dead)


def test_a_store_that_is_away_is_told(place: Place, memory_path: str) -> None:
    """What cannot be saved is an error that names the place."""
    record = place.record()
    for path in place.directory.iterdir():
        path.unlink()
    place.directory.rmdir()
    place.directory.write_bytes(b"a file")
    with pytest.raises(StoreError, match=str(place.directory)):
        save_held(place, memory_path, record, 9)


@pytest.fixture
def node(place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """The node of this process, as if it were an agent, with its signals put back afterwards."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    numbers = [*STOP_SIGNALS, signal.SIGURG]
    before = [signal.getsignal(number) for number in numbers]
    node = Node(Settings(snapshot_path=str(place.directory)))
    yield node
    node.end()
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("is_store_there", [True, False])
@pytest.mark.parametrize("is_held", [True, False])
def test_a_stop_is_one_in_order_where_nothing_is_lost(
    *, is_held: bool, is_store_there: bool, node: Node, place: Place
) -> None:
    """Between two generations, with no worker there: what is held must be safe; where nothing is, nothing is lost."""
    node.begin_generation()
    node.let_signals_through()
    if is_held:
        hold(os.environ[environment.MEMORY], place.record(), 9)
    if not is_store_there:
        shutil.rmtree(place.directory)
        place.directory.write_bytes(b"a file")
    assert node.stop("SIGTERM") == (is_store_there or not is_held)


NOBODY_READS = ("bash", "-c", 'exec "$0" "$@" 2> >(true)')


def test_an_agent_whose_terminal_is_gone_saves_all_the_same(tmp_path: Path, undisturbed_sha256: str) -> None:
    """Where nobody reads its standard error any more, a worker is lost, and restarts are spent: it is saved."""
    environment, fired = fault(tmp_path, "kill", rank=0, step=5)
    launcher = (*NOBODY_READS, *standalone(1, max_restarts=0))
    with Job(tmp_path, tmp_path, launcher, OPTIONS, environment) as job:
        assert job.wait(within=60) == 1
        assert fired.exists()
        assert len(job.events("worker.lost")) == 1
    check_goes_on(tmp_path, 5, undisturbed_sha256)


def test_a_stop_whose_last_line_nobody_reads_is_one_in_order(tmp_path: Path) -> None:
    """Ctrl-C ends whoever reads the output as well; the status is that of a stop all the same."""
    with Job(tmp_path, tmp_path, (*NOBODY_READS, *standalone(1)), OPTIONS) as job:
        job.wait_for_step(3)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(within=60) == 143
        assert len(job.events("run.stopped")) == 1

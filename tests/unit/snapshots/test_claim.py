"""Claims on a place of snapshots: who may write, who must stop, and what a late writer can spoil: nothing."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from harness import eventually
from places import HOLDER, Place
from states import Fault, FaultyStorage, manifest_of, run_config, small_state
from structlog.testing import capture_logs

from elastic_mnist.errors import Fenced, StoreError, UsageError
from elastic_mnist.ipc import environment
from elastic_mnist.snapshots import record as run_record
from elastic_mnist.snapshots.durable import DurableTier
from elastic_mnist.snapshots.holder import LeaseHolder
from elastic_mnist.snapshots.lease import Lease, is_stale
from elastic_mnist.snapshots.record import RunRecord
from elastic_mnist.snapshots.resume import Start
from elastic_mnist.snapshots.state import pack
from elastic_mnist.snapshots.storage import LocalStorage, Storage, open_storage


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """An empty place."""
    return LocalStorage(tmp_path / "snapshots") if request.param == "local" else open_storage(f"memory://{tmp_path}")


def claimed(
    storage: Storage, generation: int, *, job_id: str = "job", run_id: str = "run", began_at: int | None = None
) -> Lease:
    """Claim a place as a generation does, on top of what lies there."""
    record = RunRecord.new(run_config(), started_at=1.0)
    holder = replace(HOLDER, job_id=job_id)
    record = replace(record, run_id=run_id, generation=generation, holder=holder, began_at=began_at)
    storage.create()
    claim = Lease(storage, record, storage.etag(run_record.NAME))
    claim.acquire()
    return claim


def save(storage: Storage, claim: Lease, step: int) -> None:
    """Save a snapshot under a claim."""
    state = small_state(step, run_id=claim.record.run_id, generation=claim.record.generation)
    data = pack(state)
    DurableTier(storage, keep_last=3).save(data, manifest_of(state, data), claim.check)


def test_a_claim_stands_until_the_next(storage: Storage) -> None:
    """Its holder may write as often as it likes."""
    claim = claimed(storage, 0)
    for step in (5, 9):
        save(storage, claim, step)
    claim.check()
    newest = DurableTier(storage).newest_valid()
    assert newest is not None
    assert newest.state["step"] == 9


def test_an_older_generation_is_fenced_by_a_newer(storage: Storage) -> None:
    """It learns at its next look that it is over, and writes nothing."""
    old = claimed(storage, 0)
    claimed(storage, 1)
    before = {name: storage.get(name) for name in storage.names()}
    with pytest.raises(Fenced, match="generation 1 has taken over; this one is over"):
        save(storage, old, 5)
    with pytest.raises(Fenced):
        old.finish()
    assert {name: storage.get(name) for name in storage.names()} == before


def test_another_job_takes_over_by_name(storage: Storage) -> None:
    """A job that lost its place to another launch ends with a usage error: starting it again would be a tug of war."""
    old = claimed(storage, 5, job_id="job")
    claimed(storage, 6, job_id="another")
    with pytest.raises(UsageError, match=r"was taken over by another job, run run.*Two jobs need two --snapshot_path"):
        save(storage, old, 5)


def test_of_two_claims_at_once_one_stands(storage: Storage) -> None:
    """Two generations that have seen the same record cannot both have the place."""
    storage.create()
    records = [
        replace(RunRecord.new(run_config(), started_at=1.0), holder=LeaseHolder(job_id=name))
        for name in ("one", "other")
    ]
    one, other = (Lease(storage, record, None) for record in records)
    one.acquire()
    with pytest.raises(UsageError, match="taken over by another job"):
        other.acquire()
    one.check()


def test_a_record_that_was_removed_is_written_again(storage: Storage) -> None:
    """Somebody emptied the directory: the next snapshot makes the place whole."""
    claim = claimed(storage, 0)
    storage.delete(run_record.NAME)
    save(storage, claim, 5)
    assert run_record.read(storage) == claim.record


def test_a_claim_that_could_not_be_made_is_made_by_the_next_snapshot(storage: Storage) -> None:
    """A generation that went on from memory while the store was away follows the one before it once it is back."""
    claimed(storage, 0)
    late = Lease(storage, replace(claimed(storage, 0).record, generation=1), None)
    save(storage, late, 5)
    assert run_record.read(storage) == late.record


def test_a_claim_that_failed_after_its_look_is_made_by_the_next_snapshot(storage: Storage) -> None:
    """The record was read and could not be written: the older generation is fenced all the same, by the next save."""
    old = claimed(storage, 0)
    fault = Fault(at=0, of=("put_if_match",), raises=StoreError("503"))
    late = Lease(FaultyStorage(storage, fault), replace(old.record, generation=1), storage.etag(run_record.NAME))
    with pytest.raises(StoreError, match="503"):
        late.acquire()
    assert fault.num_fired == 1
    save(storage, late, 5)
    assert run_record.read(storage) == late.record
    with pytest.raises(Fenced):
        save(storage, old, 9)


@pytest.mark.parametrize("content", [b"", b"{", b'{"generation": 5'])
def test_a_record_that_was_damaged_is_written_again(content: bytes, storage: Storage) -> None:
    """Whoever has the claim makes it whole with its next snapshot, and tells; one that has none yet does not."""
    claim = claimed(storage, 0)
    storage.put(run_record.NAME, content)
    with pytest.raises(StoreError, match="damaged"):
        Lease(storage, replace(claim.record, generation=1), None).check()
    with capture_logs() as events:
        save(storage, claim, 5)
    assert events[0]["event"] == "run.record_damaged"
    assert run_record.read(storage) == claim.record


def test_the_end_is_noted_in_the_record(storage: Storage) -> None:
    """The record says that the run is finished, and nothing else of it changes."""
    claim = claimed(storage, 3)
    before = claim.record
    claim.finish()
    assert run_record.read(storage) == replace(before, is_finished=True)


class Interrupted(Storage):
    """A storage in which, at one operation, another process does its work first."""

    def __init__(self, inner: Storage, at: int, work: Callable[[], None], *, afterwards: bool) -> None:
        super().__init__(inner.location, "--snapshot_path")
        self._inner, self._at, self._work, self._afterwards = inner, at, work, afterwards
        self.num_operations = 0

    def _run(self, operation: str, *arguments: Any) -> Any:  # noqa: ANN401 - what the operation returns
        is_it = self.num_operations == self._at
        self.num_operations += 1
        if is_it and not self._afterwards:
            self._work()
        try:
            return getattr(self._inner, operation)(*arguments)
        finally:
            if is_it and self._afterwards:
                self._work()

    def create(self) -> None:
        """Make the place."""
        self._run("create")

    def names(self) -> list[str]:
        """List the objects."""
        names: list[str] = self._run("names")
        return names

    def get(self, name: str) -> bytes:
        """Get an object."""
        data: bytes = self._run("get", name)
        return data

    def put(self, name: str, data: bytes) -> None:
        """Put an object."""
        self._run("put", name, data)

    def etag(self, name: str) -> str | None:
        """Look at an object."""
        etag: str | None = self._run("etag", name)
        return etag

    def put_if_match(self, name: str, data: bytes, etag: str | None) -> str:
        """Put an object on a condition."""
        new_etag: str = self._run("put_if_match", name, data, etag)
        return new_etag

    def delete(self, name: str) -> None:
        """Delete an object."""
        self._run("delete", name)

    def rename(self, name: str, new_name: str) -> None:
        """Rename an object."""
        self._run("rename", name, new_name)


@pytest.mark.parametrize("afterwards", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("newer_step", [3, 5, 9], ids=["earlier-step", "same-step", "later-step"])
def test_a_writer_that_wakes_up_late_spoils_nothing(newer_step: int, tmp_path: Path, *, afterwards: bool) -> None:
    """Stopped before or after any operation of a save, while the next generation claims the place and saves.

    That one goes on from step 1, which it has seen. Whatever the late writer then does, the newest snapshot is the next
    generation's, or that of the same step that was committed before it came, whole; and the late one is told that it is
    over, or had ended. Where its own snapshot was committed all the same, and is another step's, that is rejected.
    """
    num_fenced = num_rejected = 0
    for at in count():
        storage = LocalStorage(tmp_path / str(at))
        old = claimed(storage, 0)
        save(storage, old, 1)
        done: list[Lease] = []

        def work(storage: Storage = storage, done: list[Lease] = done) -> None:
            done.append(claimed(storage, 1, began_at=1))
            save(storage, done[0], newer_step)

        interrupted = Interrupted(storage, at, work, afterwards=afterwards)
        late = Lease(interrupted, old.record, storage.etag(run_record.NAME))
        try:
            save(interrupted, late, 5)
        except Fenced:
            num_fenced += 1
        except StoreError:  # what it has just written is another's already; when it tries again
            with pytest.raises(Fenced):
                save(storage, late, 5)
            num_fenced += 1
        if not done:
            break
        done[0].check()
        tier = DurableTier(storage)
        was_committed = newer_step != 5 and "step-00000005.json" in storage.names()
        recorded = run_record.read(storage)
        with capture_logs() as events:
            newest = tier.newest_valid(is_stale=lambda manifest, recorded=recorded: is_stale(manifest, recorded))  # type: ignore[misc]
        rejected = [("snapshot.rejected", storage.path("step-00000005.pt"))] if was_committed else []
        assert [(event["event"], event["path"]) for event in events] == rejected  # and nothing was damaged
        assert ("step-00000005.json.rejected" in storage.names()) == was_committed
        num_rejected += was_committed
        assert newest is not None
        assert newest.state["step"] == newer_step
        save(storage, done[0], 10)  # clears away what the late writer may have left without its data
        for manifest in tier.manifests():
            tier.load(manifest)
    assert at > 8
    assert num_fenced > 4
    assert (num_rejected > 0) == (newer_step != 5)


def test_what_an_older_generation_saved_is_late_beyond_where_the_recorded_one_began() -> None:
    """At that step or before it, it is what was gone on from; another run's or a later generation's is not late."""
    record = replace(RunRecord.new(run_config(), started_at=1.0), run_id="run", generation=2, began_at=5)
    manifest = manifest_of(small_state(6), pack(small_state(6)), run_id="run", generation=1)
    assert is_stale(manifest, record)
    assert is_stale(replace(manifest, generation=0), record)
    assert not is_stale(replace(manifest, step=5), record)
    assert not is_stale(replace(manifest, run_id="another"), record)
    for generation in (2, 3):
        assert not is_stale(replace(manifest, generation=generation), record)
    assert not is_stale(manifest, replace(record, began_at=None))  # an older program's record does not say
    assert not is_stale(manifest, None)


def job_of(pid: int) -> LeaseHolder:
    """Return the launch that a process stands for."""
    return LeaseHolder.of(environment.WorkerEnvironment(endpoint=("localhost", 1), agent_pid=pid))


def recorded(place: Place, holder: LeaseHolder) -> Start:
    """Begin a job there as a launch."""
    return place.decide(holder=holder)


@pytest.fixture
def sleeper() -> Any:  # noqa: ANN401 - a generator of processes
    """A process that does nothing but live."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_place_in_use_by_a_living_job_is_refused_by_name(tmp_path: Path, sleeper: "subprocess.Popen[bytes]") -> None:
    """A second launch on the same path is told the run and the process that has it, and changes nothing."""
    place = Place(tmp_path)
    run_id = recorded(place, job_of(sleeper.pid)).record.run_id
    before = place.files()
    with pytest.raises(UsageError, match=f"in use by another job, run {run_id}, process {sleeper.pid} on this host"):
        place.decide(holder=job_of(os.getpid()))
    assert place.files() == before


def test_the_same_job_goes_on_in_its_place(tmp_path: Path) -> None:
    """The next generation of a living launch is not a second job."""
    place = Place(tmp_path)
    recorded(place, job_of(os.getpid()))
    assert recorded(place, job_of(os.getpid())).record.generation == 1


def test_a_dead_jobs_place_is_free(tmp_path: Path, sleeper: "subprocess.Popen[bytes]") -> None:
    """A job that was killed is followed by the next launch, also while its process is a zombie."""
    place = Place(tmp_path)
    recorded(place, job_of(sleeper.pid))
    sleeper.kill()
    stat = Path(f"/proc/{sleeper.pid}/stat")
    eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
    assert place.decide(holder=job_of(os.getpid())).record.generation == 1


def test_a_finished_jobs_place_is_free(tmp_path: Path, sleeper: "subprocess.Popen[bytes]") -> None:
    """Its process may live on; its run does not."""
    place = Place(tmp_path)
    recorded(place, job_of(sleeper.pid))
    place.finish()
    assert place.decide(holder=job_of(os.getpid())).record.generation == 1


def test_a_reused_process_id_is_no_living_job(sleeper: "subprocess.Popen[bytes]") -> None:
    """The number alone does not count: the process must have begun at the same tick, on the same host."""
    holder = job_of(sleeper.pid)
    assert holder.pid_started is not None
    assert holder.is_alive
    assert not replace(holder, pid_started=holder.pid_started - 1).is_alive
    assert not replace(holder, host="elsewhere").is_alive
    assert not replace(holder, pid_started=None).is_alive
    assert not LeaseHolder().is_alive

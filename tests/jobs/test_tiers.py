"""The two tiers of snapshots in real jobs: what a kill costs, wherever it falls, and what is left behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from harness import SMALL, Event, Job, eventually, plain, standalone
from states import commit, small_state
from structlog.testing import capture_logs
from tiers import ONE_EPOCH, SHORT, Fault, Plan, RendezvousStore, undisturbed, wait_until_gone

from elastic_mnist.cli import audit
from elastic_mnist.snapshots import record as run_record
from elastic_mnist.snapshots.durable import DurableTier
from elastic_mnist.snapshots.holder import LeaseHolder
from elastic_mnist.snapshots.record import RunRecord
from elastic_mnist.snapshots.state import State, pack
from elastic_mnist.snapshots.storage import LocalStorage

BOTH = (0, 1)
KILLS = {
    "rank 1 at a step": Fault(kind="kill", place="step", ranks=(1,), step=3, generation=0),
    "a step made and not kept": Fault(kind="kill", place="keep", ranks=(0,), step=9, generation=1),
    "both at once": Fault(kind="kill", place="step", ranks=BOTH, step=12, generation=2),
    "in the evaluation": Fault(kind="kill", place="evaluation", ranks=(1,), step=16, generation=3),
    "half-way in a write, just after an epoch's end": Fault(
        kind="kill", place="write", ranks=(0,), step=16, generation=4
    ),
}
"""One in each generation of a job."""


class Killed:
    """A job that has been through all of `KILLS`."""

    def __init__(self, directory: Path, data_dir: Path) -> None:
        self.plan = Plan(directory / "faults", *KILLS.values())
        options = (*SMALL, "--sample_log=ledger")
        launcher = standalone(2, max_restarts=len(KILLS))
        with Job(directory / "job", data_dir, launcher, options, self.plan.environment) as job:
            self.finished = job.finish()
            self.events = job.events()
        self.directory = job.directory

    def named(self, name: str) -> list[Event]:
        """Return the events of a name."""
        return [event for event in self.events if event["event"] == name]


@pytest.fixture(scope="module")
def killed(mnist_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """The job of all kills."""
    return Killed(tmp_path_factory.mktemp("killed"), mnist_dir)


@pytest.fixture(scope="module")
def undisturbed_sha256(mnist_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of the small job when nobody touches it; one process, no torchrun."""
    return str(undisturbed(tmp_path_factory.mktemp("undisturbed"), mnist_dir)["weights_sha256"])


@pytest.mark.parametrize("name", KILLS)
def test_a_kill_costs_at_most_the_step_in_flight(name: str, killed: Killed) -> None:
    """Whoever is killed and whenever, the next generation goes on from memory with every step that was kept."""
    fault, generation = KILLS[name], [*KILLS].index(name)
    fired = killed.plan.fired(generation)
    assert sorted(fired) == [("begins", rank, fault.step, fired[0][3]) for rank in fault.ranks]
    resumed = killed.named("run.resumed")[generation]
    assert (resumed["generation"], resumed["source"]) == (generation + 1, "memory")
    assert resumed["num_lost_steps"] <= 1
    assert fault.step is not None
    if fault.place == "write":  # the training may have gone on for a moment
        assert resumed["step"] >= fault.step
    else:
        assert resumed["step"] == fault.step - (fault.place == "keep")


def test_kills_change_nothing(killed: Killed, undisturbed_sha256: str) -> None:
    """After five kills the weights are the undisturbed job's, and each epoch was told once."""
    assert killed.finished["weights_sha256"] == undisturbed_sha256
    assert killed.finished["num_restarts"] == len(KILLS)
    assert [event["epoch"] for event in killed.named("epoch.finished")] == [1, 2]


def test_kills_repeat_and_drop_no_sample(killed: Killed) -> None:
    """After five kills the ledgers are found valid."""
    assert audit.run(killed.directory / "ledger", event_log=None, run_id=None) == 0


def test_a_snapshot_that_a_kill_cut_off_is_made_up_for(killed: Killed) -> None:
    """Killed while it wrote the durable snapshot of step 16, the job saves with the first step when it goes on."""
    saved = [(event["generation"], event["step"]) for event in killed.named("snapshot.saved")]
    assert saved[0][0] == 5  # not the generation that was killed in it
    resumed = killed.named("run.resumed")[-1]
    assert resumed["step"] <= saved[0][1] <= resumed["step"] + 1
    assert saved[-1][1] == 32


def test_kills_leave_nothing_beside_the_snapshots(killed: Killed) -> None:
    """Of the write that was cut off half-way no temporary file is left."""
    names = {path.name for path in (killed.directory / "snapshots").iterdir()}
    steps = {event["step"] for event in killed.named("snapshot.saved")}
    files = {f"step-{step:08d}.{kind}" for step in steps for kind in ("json", "pt")}
    assert names == {"events.jsonl", "run.json"} | files


@pytest.mark.parametrize("is_shared", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["shared", "not-shared"])
def test_the_node_of_rank_0_is_lost(mnist_dir: Path, tmp_path: Path, *, is_shared: bool) -> None:
    """Another node, and one that comes later, go on from memory with every step that was kept; nothing changes.

    The rendezvous lives apart, as it would on a third machine: agent and worker of rank 0's node are killed. Where the
    nodes have no file system in common, the others have never seen a snapshot of the run.
    """
    places = [tmp_path / "job"] * 3 if is_shared else [tmp_path / name for name in "abc"]
    # Each waits for the node that comes, whose arrival ends it.
    until_second = Fault(kind="hold", place="step", ranks=(0,), step=4)
    until_third = Fault(kind="hold", place="step", ranks=(0,), step=16, generation=None)
    plan = Plan(tmp_path / "faults", until_second, until_third)

    def is_later(started: Event) -> bool:
        return bool(started["generation"] > resumed["generation"] and started["world_size"] == 2)

    with RendezvousStore() as store, store.agent(places[0], mnist_dir, ONE_EPOCH, plan.environment) as first:
        plan.wait(0)
        with store.agent(places[1], mnist_dir, ONE_EPOCH, plan.environment) as second:
            first.wait_for_step(8, generation=1)
            first.kill_all()
            reached = first.progress()[1]
            resumed = eventually(lambda: next((e for e in second.events("run.resumed") if e["generation"] > 1), None))
            assert (resumed["source"], resumed["world_size"]) == ("memory", 1)
            assert resumed["step"] in (reached, reached + 1)  # it is marked after it is kept
            assert resumed["num_lost_steps"] == (0 if is_shared else None)
            with store.agent(places[2], mnist_dir, ONE_EPOCH, plan.environment) as third:
                later = eventually(lambda: [e for e in second.events("run.started") if is_later(e)])
                assert later[0]["source"] == "memory"
                plan.let_go(1)
                finished = second.finish()
                assert third.wait() == 0, third.output
    assert finished["weights_sha256"] == undisturbed(tmp_path / "undisturbed", mnist_dir, ONE_EPOCH)["weights_sha256"]
    logs = [place / "snapshots" / "events.jsonl" for place in dict.fromkeys(places)]
    (tmp_path / "all.jsonl").write_text("".join(log.read_text() for log in logs))
    assert audit.run(tmp_path / "ledger", event_log=tmp_path / "all.jsonl", run_id=finished["run_id"]) == 0


SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at only


def memories_of(agent: int) -> set[tuple[int, int]]:
    """Return device and inode of each memory without a name that an agent holds."""
    paths = [path for path in Path(f"/proc/{agent}/fd").iterdir() if str(path.readlink()).startswith("/memfd:")]
    return {(path.stat().st_dev, path.stat().st_ino) for path in paths}


def holders_of(memories: set[tuple[int, int]]) -> set[int]:
    """Return the processes that have one of some memories open or mapped."""
    inodes = {str(inode) for _, inode in memories}
    holders = set()
    for process in psutil.process_iter():
        try:
            found = [path.stat() for path in Path(f"/proc/{process.pid}/fd").iterdir()]
            mapped = [line.split() for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()]
        except OSError:  # it has ended meanwhile, or is another user's
            continue
        is_open = not memories.isdisjoint((one.st_dev, one.st_ino) for one in found)
        if is_open or any(words[4] in inodes and words[5].startswith("/memfd:") for words in mapped if len(words) > 5):
            holders.add(process.pid)
    return holders


class Sparing:
    """A job that keeps every third step in memory and is killed at step 8; /dev/shm has room for 64 KiB if possible.

    Attributes:
        why_not: the reason why no small /dev/shm can be mounted here; empty where one is.
        shm_size_bytes, shm_names: what it was in the middle of the job.
    """

    def __init__(self, directory: Path, data_dir: Path) -> None:
        command = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"', "sh")
        tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
        self.why_not = (tried.stderr.strip() or "it fails") if tried.returncode else ""
        kill = Fault(kind="kill", place="step", ranks=(0,), step=8)
        look = Fault(kind="hold", place="step", ranks=(0,), step=20, generation=1)
        self.plan = Plan(directory / "faults", kill, look)
        launcher = standalone(2) if self.why_not else (*command, *standalone(2))
        options = (*SMALL, "--memory_snapshot_every=3")
        with Job(directory / "job", data_dir, launcher, options, self.plan.environment) as job:
            self.plan.wait(1)
            shm = Path(f"/proc/{job.process.pid}/root/dev/shm")
            self.shm_size_bytes = os.statvfs(shm).f_blocks * os.statvfs(shm).f_frsize
            self.shm_names = [path.name for path in shm.iterdir()]
            self.plan.let_go(1)
            self.finished = job.finish()
            (self.resumed,) = job.events("run.resumed")


@pytest.fixture(scope="module")
def sparing(mnist_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Sparing:
    """The job with little memory."""
    return Sparing(tmp_path_factory.mktemp("sparing"), mnist_dir)


def test_a_memory_snapshot_every_third_step(sparing: Sparing, undisturbed_sha256: str) -> None:
    """With `--memory_snapshot_every=3` a job killed at step 8 goes on from memory at step 6, 2 steps lost."""
    assert sparing.plan.fired(0) == [("begins", 0, 8, 8)]
    resumed = sparing.resumed
    assert (resumed["source"], resumed["step"], resumed["num_lost_steps"]) == ("memory", 6, 2)
    assert sparing.finished["num_lost_steps"] == 2
    assert sparing.finished["weights_sha256"] == undisturbed_sha256


def test_a_tiny_shm_is_enough(sparing: Sparing) -> None:
    """Where /dev/shm has room for 64 KiB, a killed job goes on from memory; nothing is ever put there."""
    if sparing.why_not:
        pytest.skip(f"no small /dev/shm can be mounted here: {sparing.why_not}")
    assert (sparing.shm_size_bytes, sparing.shm_names) == (64 * 1024, [])
    assert sparing.resumed["source"] == "memory"


@pytest.mark.parametrize("end", ["finished", "agent killed"])
def test_nothing_is_left_behind(end: str, mnist_dir: Path, tmp_path: Path) -> None:
    """After a good end, or SIGKILL of the agent, there is no process, shared memory or temporary file of ours."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    shared_before = {*SHARED_MEMORY.iterdir()}
    plan = Plan(tmp_path / "faults", Fault(kind="hold", place="step", ranks=(1,), step=3))
    environment = {**plan.environment, "TMPDIR": str(temporary)}
    with Job(tmp_path / "job", mnist_dir, standalone(2), SHORT, environment) as job:
        plan.wait()
        memories = memories_of(job.process.pid)
        workers = job.workers()
        assert len(workers) == 2
        eventually(lambda: holders_of(memories) >= {job.process.pid, job.worker(0).pid})
        if end == "finished":
            plan.let_go()
            job.finish()
        else:
            job.process.kill()
            job.process.wait()
        wait_until_gone(workers)
        eventually(lambda: not holders_of(memories), within=30, what="the end of the memory")
        eventually(lambda: not {*SHARED_MEMORY.iterdir()} - shared_before, within=30, what="an empty /dev/shm")
    torchs_own = ("torchelastic_", "torchinductor_")  # its logs, its cache
    ours = [path for path in temporary.iterdir() if not path.name.startswith(torchs_own)]
    assert ours == []
    assert not [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(tmp_path / "job")]


class Slowed:
    """A job each of whose durable writes takes a second longer, due every 5 steps."""

    def __init__(self, directory: Path, data_dir: Path) -> None:
        write = Fault(kind="sleep", place="write", ranks=(0,), step=None, seconds=1.0)
        plan = Plan(directory / "faults", write)
        options = (*SMALL, "--save_every_steps=5")
        with Job(directory / "job", data_dir, plain(), options, plan.environment) as job:
            self.finished = job.finish()
            self.events = job.events()
        self.writes = plan.fired()


@pytest.fixture(scope="module")
def slowed(mnist_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Slowed:
    """The job with slow writes."""
    return Slowed(tmp_path_factory.mktemp("slowed"), mnist_dir)


def test_the_training_goes_on_during_a_write(slowed: Slowed) -> None:
    """The write of step 5's snapshot begins about then, and when it ends, steps have been made meanwhile."""
    (_, _, step, begun_at), (_, _, _, ended_at) = slowed.writes[:2]
    assert step == 5
    assert begun_at is not None
    assert ended_at is not None
    assert ended_at >= begun_at + 2


def test_one_snapshot_is_written_at_a_time(slowed: Slowed) -> None:
    """No write begins before the one before has ended, and what is never written is told to be superseded."""
    assert [what for what, *_ in slowed.writes] == ["begins", "ended"] * (len(slowed.writes) // 2)
    written = [step for _, _, step, _ in slowed.writes[::2]]
    superseded = [event["step"] for event in slowed.events if event["event"] == "snapshot.superseded"]
    assert superseded
    assert sorted(written + superseded) == [5, 10, 15, 16, 20, 25, 30, 32]


def test_the_last_snapshot_is_waited_for(slowed: Slowed) -> None:
    """The job tells its end after the snapshot of its last step is saved."""
    saved = [event["step"] for event in slowed.events if event["event"] == "snapshot.saved"]
    names = [event["event"] for event in slowed.events]
    assert saved[-1] == 32
    assert names.index("run.finished") > max(i for i, name in enumerate(names) if name == "snapshot.saved")


def test_slow_writes_change_nothing(slowed: Slowed, undisturbed_sha256: str) -> None:
    """The weights are the undisturbed job's."""
    assert slowed.finished["weights_sha256"] == undisturbed_sha256


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB, too small for a snapshot."""
    disk = tmp_path / "job" / "disk"
    disk.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


ON_DISK = (*SMALL, "--save_every_steps=5", "--snapshot_path=disk", "--event_log=snapshots/events.jsonl")


def test_a_disk_that_stays_full_stops_the_job(mnist_dir: Path, small_disk: Path, tmp_path: Path) -> None:
    """With one more failed snapshot in a row than allowed the job ends, not restarted, and names option and cause."""
    hold = Fault(kind="hold", place="step", ranks=(1,), step=12)  # both snapshots have failed by then
    plan = Plan(tmp_path / "faults", hold, has_pauses=False)
    options = (*ON_DISK, "--max_snapshot_failures=1")
    with Job(small_disk.parent, mnist_dir, standalone(2), options, plan.environment) as job:
        job.wait_for_event("snapshot.failed", count=2)
        plan.wait()
        plan.let_go()
        assert job.wait() == 2
        (line,) = [text for text in job.output.splitlines() if text.startswith("elastic_mnist: error: ")]
        assert "--max_snapshot_failures allows 1" in line
        assert "No space left on device" in line
        assert [event["step"] for event in job.events("snapshot.failed")] == [5, 10]
        assert len(job.events("run.started")) == 1


def test_a_disk_that_has_room_again_is_used(
    mnist_dir: Path, small_disk: Path, tmp_path: Path, undisturbed_sha256: str
) -> None:
    """A snapshot fails on a full disk and is told; with room, the next ones are saved, and the job ends well."""
    plan = Plan(tmp_path / "faults", Fault(kind="hold", place="step", ranks=(0,), step=9), has_pauses=False)
    with Job(small_disk.parent, mnist_dir, plain(), ON_DISK, plan.environment) as job:
        job.wait_for_event("snapshot.failed")
        plan.wait()
        subprocess.run(["mount", "-o", "remount,size=200m", str(small_disk)], check=True)
        plan.let_go()
        finished = job.finish()
        assert [event["step"] for event in job.events("snapshot.failed")] == [5]
        assert job.events("snapshot.saved")[-1]["step"] == 32
    assert finished["weights_sha256"] == undisturbed_sha256


def test_a_second_job_on_the_same_path_is_refused(mnist_dir: Path, tmp_path: Path, undisturbed_sha256: str) -> None:
    """Under the same settings it is told the run and the process that is at work there; the first one ends unharmed."""
    plan = Plan(tmp_path / "faults", Fault(kind="hold", place="step", ranks=(0,), step=5))
    with Job(tmp_path / "job", mnist_dir, standalone(2), SMALL, plan.environment) as first:
        plan.wait()
        snapshots = tmp_path / "job" / "snapshots"
        before = (snapshots / "run.json").read_bytes()
        elsewhere = (*SMALL, f"--snapshot_path={snapshots}", f"--event_log={tmp_path / 'events.jsonl'}")
        with Job(tmp_path / "second", mnist_dir, plain(), elsewhere) as second:
            assert second.wait(within=30) == 2
            run_id = first.events("run.started")[0]["run_id"]
            (line,) = [text for text in second.output.splitlines() if text.startswith("elastic_mnist: error: ")]
            assert f"in use by another job, run {run_id}, process {first.process.pid} on this host" in line
        assert (snapshots / "run.json").read_bytes() == before
        plan.let_go()
        assert first.finish()["weights_sha256"] == undisturbed_sha256
        assert first.events("run.resumed") == []


@pytest.mark.parametrize("newer", ["generation", "job"])
def test_a_worker_that_wakes_up_late_overwrites_nothing(newer: str, mnist_dir: Path, tmp_path: Path) -> None:
    """Stopped half-way in a write and continued after somebody else has taken over, it ends and says why.

    What the other one has written since is as it was: its record, and its snapshot of the same step.
    """
    plan = Plan(tmp_path / "faults", Fault(kind="stop", place="write", ranks=(0,), step=5))
    with Job(tmp_path / "job", mnist_dir, plain(), (*SMALL, "--save_every_steps=5"), plan.environment) as job:
        plan.wait()
        late = psutil.Process(job.process.pid)
        eventually(lambda: late.status() == psutil.STATUS_STOPPED)
        storage = LocalStorage(tmp_path / "job" / "snapshots")
        mine = run_record.read(storage)
        assert mine is not None
        theirs = (
            mine.next_generation(num_lost_steps=0, contract=mine.contract)
            if newer == "generation"
            else replace(RunRecord.new(mine.contract, started_at=1.0), holder=LeaseHolder(pid=1, job_id="another"))
        )
        storage.put(run_record.NAME, theirs.to_json())
        commit(storage, 5, state=small_state(5, run_id=theirs.run_id))
        names = ("run.json", "step-00000005.json", "step-00000005.pt")
        before = {name: storage.get(name) for name in names}
        late.send_signal(signal.SIGCONT)
        status = job.wait()
        assert {name: storage.get(name) for name in storage.names() if name in names} == before
        assert not [name for name in storage.names() if name.startswith("step-") and name not in names]
        assert plan.fired()[-1][0] == "ended"
        if newer == "generation":
            (fenced,) = job.events("run.fenced")
            assert "generation 1 has taken over" in fenced["reason"]
            assert status == 1
        else:
            assert f"was taken over by another job, run {theirs.run_id}, process 1" in job.output
            assert status == 2
        assert job.events("run.finished") == []


SAVE_WHEN_TOLD = """
import io, os, sys, time
from pathlib import Path

sys.path[:0] = {paths!r}
import test_tiers
from elastic_mnist.snapshots.storage import LocalStorage
from states import commit

def tell(line):
    os.write(1, line.encode())  # whole, whoever is killed meanwhile

def point():
    tell("point\\n")
    time.sleep(0.005)

class Slow(io.FileIO):
    def write(self, data):
        size = -(-len(data) // 10)
        for begin in range(0, len(data), size):
            super().write(data[begin : begin + size])
            point()
        return len(data)

def slowed(function):
    def slow(*arguments, **keywords):
        point()
        result = function(*arguments, **keywords)
        point()
        return result
    return slow

open_as_ever = Path.open
Path.open = lambda path, mode="r", *rest: Slow(path, mode) if mode == "xb" else open_as_ever(path, mode, *rest)
Path.replace, Path.unlink, os.fsync = slowed(Path.replace), slowed(Path.unlink), slowed(os.fsync)
for line in sys.stdin:
    writer = os.fork()
    if writer == 0:
        storage = LocalStorage(Path(sys.argv[1]))
        storage.create()
        commit(storage, int(line), keep_last=1, state=test_tiers.steady_state(int(line)))
        os._exit(0)
    tell(f"writer {{writer}}\\n")
    os.waitpid(writer, 0)
    tell("gone\\n")
"""
"""Forks a process for each save, so that 50 of them import torch once."""


def steady_state(step: int) -> State:
    """Return a state whose weights are full of its step: a mixture of two would show."""
    return small_state(step, model={"weight": torch.full((50_000,), float(step))})


class Writer:
    """A process that saves snapshots at a place, slowly."""

    def __init__(self, place: Path) -> None:
        program = SAVE_WHEN_TOLD.format(paths=sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def save(self, step: int, *, killed_at: int | None = None) -> int:
        """Save; kill it at one of the points that it passes; return how many it has passed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{step}\n")
        self.process.stdin.flush()
        num_points, writer = 0, None
        for line in self.process.stdout:
            words = line.split()
            if words[0] == "gone":
                return num_points
            if words[0] == "writer":
                writer = int(words[1])
            else:
                num_points += 1
            if killed_at is not None and num_points >= killed_at and writer is not None:
                os.kill(writer, signal.SIGKILL)
                killed_at = None
        raise AssertionError("the process has ended")


@pytest.mark.parametrize("num_kills", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_kills_spread_over_a_save_leave_the_old_snapshot_or_the_new_one(num_kills: int, tmp_path: Path) -> None:
    """After each SIGKILL what loads is whole, and the old or the new; what was half written is never taken.

    The next save clears it away.
    """
    storage, writer = LocalStorage(tmp_path), Writer(tmp_path)
    found, num_leftovers = [], 0
    with writer.process:
        writer.save(1)
        num_points, newest = writer.save(2), 2
        assert num_points > 30
        for kill in range(num_kills):
            step = newest + 1
            writer.save(step, killed_at=1 + kill * num_points // num_kills)
            num_leftovers += len([path for path in tmp_path.iterdir() if path.name.endswith(".tmp")])
            with capture_logs() as events:
                snapshot = DurableTier(storage).newest_valid()
            assert events == []
            assert snapshot is not None
            assert snapshot.data == pack(steady_state(snapshot.state["step"]))
            found.append(snapshot.state["step"] - newest)
            newest += found[-1]
        writer.save(newest + 1)
        writer.process.kill()
    assert set(found) == {0, 1}
    assert num_leftovers > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"step-{newest + 1:08d}.json",
        f"step-{newest + 1:08d}.pt",
    ]

"""Signs of life: written, read, and what is concluded from them."""

import contextlib
import json
import multiprocessing
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import eventually
from hypothesis import given
from hypothesis import strategies as st

from elastic_mnist.agent.watchdog import Watchdog
from elastic_mnist.ipc import heartbeat, processes
from elastic_mnist.ipc.heartbeat import HeartbeatRecord
from elastic_mnist.worker.heartbeat import HeartbeatWriter

NUMBERS = st.integers(0, 2**63 - 1)

Watch = Callable[[float], Watchdog]


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    """Begins a watch that tells in events.jsonl, given its timeout in seconds; over at the end of the test."""
    with contextlib.ExitStack() as watches:

        def begin(hang_timeout: float) -> Watchdog:
            warden = Watchdog(hang_timeout=hang_timeout, event_log=tmp_path / "events.jsonl")
            return watches.enter_context(contextlib.closing(warden))

        yield begin


@given(
    numbers=st.tuples(*[NUMBERS] * 9),
    phase=st.sampled_from(
        [heartbeat.SETTING_UP, heartbeat.COMPUTING, heartbeat.WAITING, heartbeat.SAVING, heartbeat.EXIT_BARRIER]
    ),
    run_id=st.text("0123456789abcdef", max_size=12),
)
def test_a_sign_is_read_as_it_was_written(numbers: tuple[int, ...], phase: str, run_id: str) -> None:
    """Every field comes back, of every phase there is."""
    names = [name for name in HeartbeatRecord.__dataclass_fields__ if name not in ("phase", "run_id")]
    sign = HeartbeatRecord(**dict(zip(names, numbers, strict=True)), phase=phase, run_id=run_id)
    assert HeartbeatRecord.from_bytes(sign.to_bytes()) == sign


def test_of_workers_that_refuse_at_once_one_is_the_first(tmp_path: Path) -> None:
    """Each is counted, where the agent looks, and exactly one tells people."""
    table = tmp_path / "table"
    table.write_bytes(bytes(heartbeat.TABLE_SIZE))
    with table.open("rb") as file:
        assert heartbeat.num_refusals(file.fileno()) == 0
        with multiprocessing.get_context("spawn").Pool(4) as workers:
            assert sorted(workers.map(heartbeat.refuse, [str(table)] * 20, chunksize=1)) == [False] * 19 + [True]
        assert heartbeat.num_refusals(file.fileno()) == 20
        assert heartbeat.read(file.fileno()) == []


def test_stops_are_counted_for_one_generation(watch: Watch) -> None:
    """How many workers have stopped, and how many of them were asked by others than the agent; the next one forgets."""
    warden = watch(60.0)
    assert not warden.has_stopped
    heartbeat.stopped(warden.path, by_others=False)
    assert (warden.has_stopped, warden.is_stopped_by_others) == (True, False)
    heartbeat.stopped(warden.path, by_others=True)
    heartbeat.refuse(warden.path)
    assert warden.is_stopped_by_others
    warden.begin_generation()
    assert (warden.has_stopped, warden.is_stopped_by_others, warden.is_refused) == (False, False, True)


def test_a_refusal_without_an_agent_is_told_all_the_same(tmp_path: Path) -> None:
    """Whoever has no table, or finds it gone, is the first."""
    assert heartbeat.refuse(None)
    assert heartbeat.refuse(str(tmp_path / "gone"))


def test_phases_nest() -> None:
    """What was being done before goes on afterwards, also after an error."""
    heartbeat_writer = HeartbeatWriter()
    with heartbeat_writer.phase(heartbeat.COMPUTING):
        with pytest.raises(RuntimeError), heartbeat_writer.phase(heartbeat.WAITING):
            raise RuntimeError
        assert heartbeat_writer._phase == heartbeat.COMPUTING
    assert heartbeat_writer._phase == heartbeat.SETTING_UP


BEAT = """
import sys, time
from elastic_mnist.ipc.heartbeat import COMPUTING, WAITING
from elastic_mnist.worker.heartbeat import heartbeat_writer
heartbeat_writer.rank, heartbeat_writer.world_size, heartbeat_writer.generation = 1, 9, 2
heartbeat_writer.run_id, heartbeat_writer.step = "abc", 17
heartbeat_writer.start(sys.argv[1], local_rank=1, hang_timeout=3600)
with heartbeat_writer.phase(COMPUTING):
    print("computing", flush=True)
    while True:
        heartbeat_writer.progress()
        time.sleep(0.05)
"""
WAIT = """
    with heartbeat_writer.phase(WAITING):
        heartbeat_writer.finished(18)
        print("waiting", flush=True)
        input()
"""


def test_a_heart_writes_where_the_agent_looks(tmp_path: Path) -> None:
    """Step, rank, phase and a growing number of beats stand in the slot of its local rank; a step at once."""
    table = tmp_path / "table"
    table.write_bytes(bytes(heartbeat.TABLE_SIZE))
    code = BEAT[: BEAT.index("    while")] + WAIT
    with (
        table.open("rb", buffering=0) as file,
        subprocess.Popen(
            [sys.executable, "-c", code, str(table)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as worker,
    ):
        assert worker.stdout is not None
        assert [worker.stdout.readline() for _ in range(2)] == ["computing\n", "waiting\n"]
        (seen,) = heartbeat.read(file.fileno())
        assert (seen.pid, seen.pid_started) == (worker.pid, processes.started(worker.pid))
        assert (seen.rank, seen.world_size, seen.generation, seen.run_id) == (1, 9, 2, "abc")
        assert (seen.step, seen.phase) == (18, heartbeat.WAITING)
        eventually(lambda: heartbeat.read(file.fileno())[0].num_beats > seen.num_beats + 2)
        worker.communicate("\n")


def test_a_worker_that_stands_still_before_its_first_sign_is_killed(
    tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before it could say who it is, it is missed all the same, told of, and killed; one that runs is not."""
    monkeypatch.setattr(heartbeat, "SETTING_UP_SECONDS", 1.0)
    log = tmp_path / "events.jsonl"
    watch(1.0)
    command = [sys.executable, "-c", "input()"]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE) as stopped,
        subprocess.Popen(command, stdin=subprocess.PIPE) as running,
    ):
        stopped.send_signal(signal.SIGSTOP)
        assert stopped.wait(60) == -signal.SIGKILL
        assert running.poll() is None
        told = eventually(lambda: log.read_text() if log.exists() else None)
        assert told.count("\n") == 1
        assert '"event": "worker.hung"' in told
        assert f'"pid": {stopped.pid}' in told


def test_a_watch_that_is_over_kills_nobody(tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that stands still is left to the watch of its own job, also where the job before had less patience."""
    log = tmp_path / "events.jsonl"
    monkeypatch.setattr(heartbeat, "SETTING_UP_SECONDS", 0.0)
    watch(0.0).close()
    watch(1.0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stopped:
        stopped.send_signal(signal.SIGSTOP)
        assert stopped.wait(60) == -signal.SIGKILL
    (told,) = eventually(lambda: log.read_text() if log.exists() else "").splitlines()
    assert json.loads(told)["reason"] == "stopped for 1 s before its first sign of life; killed"


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_worker_that_dies_without_a_word_is_told_of_once(tmp_path: Path, watch: Watch, *, has_ended: bool) -> None:
    """One that was killed is named, with rank and step; one that has said that it ends is not."""
    log = tmp_path / "events.jsonl"
    warden = watch(60.0)
    last_word = "    heartbeat_writer.end(); print('ended', flush=True); time.sleep(600)\n"
    code = BEAT + last_word if has_ended else BEAT
    if has_ended:
        code = code.replace("    while True:\n        heartbeat_writer.progress()\n        time.sleep(0.05)\n", "")
    with subprocess.Popen([sys.executable, "-c", code, warden.path], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "computing\n"
        if has_ended:
            assert worker.stdout.readline() == "ended\n"
        worker.kill()
        worker.wait()
        for _ in range(2):
            warden.tell_of_the_lost()
        warden.begin_generation()
    told = log.read_text().splitlines() if log.exists() else []
    assert len(told) == (not has_ended)
    for line in told:
        event = json.loads(line)
        assert (event["event"], event["rank"], event["step"], event["pid"]) == ("worker.lost", 1, 17, worker.pid)


def test_a_warden_kills_whom_it_misses_and_nobody_else(tmp_path: Path, watch: Watch) -> None:
    """Of two workers, the one that is stopped is killed and told of; the one that works is let be."""
    log = tmp_path / "events.jsonl"
    warden = watch(1.0)
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", BEAT.replace("local_rank=1", f"local_rank={rank}"), warden.path],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "computing\n"
        workers[1].send_signal(signal.SIGSTOP)
        assert workers[1].wait(60) == -signal.SIGKILL
        assert workers[0].poll() is None
        told = eventually(lambda: log.read_text() if log.exists() else None)
        assert told.count("\n") == 1
        for part in (
            '"event": "worker.hung"',
            '"rank": 1',
            '"step": 17',
            '"condition": "stopped"',
            f"{workers[1].pid}",
        ):
            assert part in told
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def test_a_dead_process_has_no_start_and_a_living_one_keeps_it() -> None:
    """The tick at which a process began tells it from a later one of the same number."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = processes.started(process.pid)
    assert started is not None
    assert processes.started(process.pid) == started
    process.kill()
    eventually(lambda: processes.condition(process.pid) == "dead")
    assert processes.started(process.pid) is None  # a zombie, still
    process.communicate()
    assert processes.started(process.pid) is None
    assert processes.condition(process.pid) == "dead"

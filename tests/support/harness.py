"""Real jobs under real torchrun, disturbed at coordinates, for the tests.

A `Job` is one torchrun agent with its workers in a working directory of its own. Every wait has a deadline
and fails with what the job printed; nothing a test starts outlives it.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import forked
import psutil
from typing_extensions import Self

WAIT_SECONDS = 90.0
_POLL_SECONDS = 0.01

Event = dict[str, Any]
Value = TypeVar("Value")

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")

# A small job on real MNIST: 16 steps an epoch, the last one short; neither size divides the next.
SMALL = (
    "--train_samples=1000",
    "--test_samples=300",
    "--global_batch_size=64",
    "--micro_batch_size=24",
    "--epochs=2",
)


def eventually(condition: Callable[[], Value | None], *, within: float = WAIT_SECONDS, what: str = "") -> Value:
    """Return the first true value of `condition`; fail once `within` seconds have passed."""
    deadline = time.monotonic() + within
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {within} s: {what or condition}"
        time.sleep(_POLL_SECONDS)


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Job:
    """One torchrun agent, or one plain process, and the workers it starts.

    Args:
        directory: working directory; made if missing. Snapshots and events lie in its `snapshots`.
        data_dir: the data set's.
        launcher: the command up to and with `-m elastic_mnist`.
        options: of the training.
        environment: on top of this process's own.
        is_forked: whether this Python's own command lines are run in a process forked from one that has imported torch;
            it has not the command line and the environment in /proc that a started one has.
    """

    def __init__(
        self,
        directory: Path,
        data_dir: Path,
        launcher: Sequence[str],
        options: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        *,
        is_forked: bool = True,
    ) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        number = len(list(directory.glob("output-*")))
        self._output_path = directory / f"output-{number}"
        self._number_of_lines_before = len(self._lines())
        start: Callable[..., forked.Process | subprocess.Popen[bytes]]
        start = forked.Process if is_forked and forked.can_run(launcher) else subprocess.Popen
        with self._output_path.open("wb") as output:
            self.process = start(
                [*launcher, "--data_dir", str(data_dir), *options],
                cwd=directory,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        self._seen: dict[int, psutil.Process] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.workers()
        for process in self._seen.values():
            _kill(process)
        self.process.kill()
        self.process.wait()

    @property
    def output(self) -> str:
        """All that the job has printed."""
        return self._output_path.read_text(errors="replace")

    def events(self, name: str | None = None, *, whole_log: bool = False) -> list[Event]:
        """Return the events since this job was started, those called `name` if one is given."""
        lines = self._lines()[0 if whole_log else self._number_of_lines_before :]
        events = [json.loads(line) for line in lines]
        return [event for event in events if name in (None, event["event"])]

    def _lines(self) -> list[str]:
        try:
            text = (self.directory / "snapshots" / "events.jsonl").read_text()
        except FileNotFoundError:
            return []
        return text[: text.rfind("\n") + 1].splitlines()

    def progress(self) -> tuple[int, int]:
        """Return the generation and the number of steps that rank 0 has finished; (-1, -1) before the first."""
        try:
            _, generation, step = (self.directory / "snapshots" / "events.jsonl.progress").read_text().split()
        except (FileNotFoundError, ValueError):
            return -1, -1
        return int(generation), int(step)

    def wait_for_step(self, step: int, *, generation: int = 0) -> int:
        """Wait until `generation`, or a later one, has finished `step`; return the step it has."""

        def reached() -> tuple[int, int] | None:
            now = self.progress()
            assert self.process.poll() is None or now >= (generation, step), self.output
            return now if now >= (generation, step) else None

        return eventually(reached, what=f"generation {generation} at step {step}:\n{self.output}")[1]

    def wait_for_event(self, name: str, *, count: int = 1) -> list[Event]:
        """Wait until there are `count` events called `name`."""

        def told() -> list[Event] | None:
            events = self.events(name)
            return events if len(events) >= count else None

        return eventually(told, what=f"{count} x {name}")

    def workers(self) -> list[psutil.Process]:
        """Return the living workers."""
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            children = []
        workers = [child for child in children if _rank(child) is not None]
        self._seen.update({worker.pid: worker for worker in workers})
        return workers

    def worker(self, rank: int) -> psutil.Process:
        """Return the living worker of a rank."""
        return eventually(lambda: next((w for w in self.workers() if _rank(w) == rank), None), what=f"rank {rank}")

    def kill(self, rank: int, sign: signal.Signals = signal.SIGKILL) -> psutil.Process:
        """Send a signal to a rank's worker, and prove that a SIGKILL has ended it."""
        worker = self.worker(rank)
        worker.send_signal(sign)
        if sign == signal.SIGKILL:
            eventually(lambda: not alive(worker), what=f"{worker} gone")
        return worker

    def kill_all(self) -> None:
        """Kill the agent and its workers, as a lost machine would be."""
        workers = self.workers()
        self.process.kill()
        self.process.wait()
        for worker in workers:
            _kill(worker)

    def wait(self, *, within: float = 180.0) -> int:
        """Return the job's exit status."""
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended within {within} s:\n{self.output}") from None

    def finish(self, *, within: float = 180.0) -> Event:
        """Wait for the job's success; return its `run.finished`."""
        assert self.wait(within=within) == 0, self.output
        (finished,) = self.events("run.finished")
        return finished

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events())


def torchrun(*options: str) -> tuple[str, ...]:
    """Return the launcher's command with torchrun's own options."""
    return (*TORCHRUN, *options, "-m", "elastic_mnist")


def standalone(num_processes: int, *, max_restarts: int = 3) -> tuple[str, ...]:
    """Return the launcher's command for one node."""
    return torchrun("--standalone", f"--nproc_per_node={num_processes}", f"--max_restarts={max_restarts}")


def plain() -> tuple[str, ...]:
    """Return the command of one process without torchrun."""
    return (sys.executable, "-m", "elastic_mnist")


def alive(process: psutil.Process) -> bool:
    """Whether a process is still running; a zombie is not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def contents(directory: Path) -> dict[str, tuple[bytes, int]]:
    """Return each file's bytes and modification time."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def _rank(process: psutil.Process) -> int | None:
    try:
        return int(process.environ()["RANK"]) if "elastic_mnist" in process.cmdline() else None
    except (psutil.Error, KeyError):
        return None


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
        process.wait(10)
    except psutil.NoSuchProcess:
        return


def fault(directory: Path, kind: str, *, rank: int, step: int, generation: int = 0) -> tuple[dict[str, str], Path]:
    """Return the environment that plants a fault at a coordinate, and the file that proves that it fired."""
    directory.mkdir(parents=True, exist_ok=True)
    fired = directory / "fired"
    faults = Path(__file__).resolve().parent / "faults"
    return {
        "PYTHONPATH": os.pathsep.join([str(faults), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "ELASTIC_MNIST_TEST_FAULT": f"{kind} {rank} {step} {generation} {fired}",
    }, fired


# Long enough that a node can join and leave in mid-epoch; one epoch, a snapshot every 5 steps.
LONG = (
    "--train_samples=12000",
    "--test_samples=300",
    "--global_batch_size=96",
    "--micro_batch_size=32",
    "--epochs=1",
    "--save_every_steps=5",
    "--sample_log=ledger",
)


def agent(
    directory: Path, data_dir: Path, port: int, *, address: str = "127.0.0.1", options: Sequence[str] = ()
) -> Job:
    """Start an agent with the README's line for several nodes, here all on one host."""
    line = ("--max_restarts=3", "--nnodes=1:2", "--master_addr=127.0.0.1", f"--master_port={port}")
    return Job(directory, data_dir, torchrun(*line, f"--local_addr={address}"), (*LONG, *options))

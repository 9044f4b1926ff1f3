"""Runs a job: starts its agents and starts them again, as a supervisor would, and disturbs it where a worker cannot.

What happened is noted in `notes.jsonl`, for the history; nothing is judged here. Every wait has a deadline, and no
process of the job outlives `run`.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from elastic_mnist.chaos import leftovers
from elastic_mnist.chaos.plan import KINDS, Fault
from elastic_mnist.chaos.planted import PLAN_VARIABLE, Marks, write_plan
from elastic_mnist.errors import EXIT_USAGE

NOTES: Final = "notes.jsonl"

LEFTOVER_SECONDS: Final = 30.0
"""After its end, a job has so long until nothing of it is left."""

_PLANT: Final = Path(__file__).resolve().parent / "plant"
_POLL_SECONDS: Final = 0.02
_ORPHAN_SECONDS: Final = 10.0
_NUM_SPARE_STARTS: Final = 2


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """A job to be run.

    Attributes:
        directory: working directory of its agents; its snapshots, its ledger and all notes are there.
        options: of the training.
        num_processes: workers of a node.
        max_nodes: nodes at most.
        faults: the plan; empty for none.
        seconds: after which the job is overdue, and ended.
        still_seconds: without a new step, after which it is ended as well.
    """

    directory: Path
    options: Sequence[str]
    num_processes: int
    max_nodes: int
    faults: tuple[Fault, ...]
    seconds: float
    still_seconds: float


def run(job: JobPlan, tell: Callable[[str], None]) -> None:
    """Run a job to its end, whatever that is; `tell` is told what happens meanwhile."""
    (job.directory / leftovers.TMPDIR).mkdir(parents=True, exist_ok=True)
    write_plan(job.directory / "plan.json", job.faults)
    try:
        _Supervisor(job, tell).run()
    finally:
        undying = leftovers.kill(job.directory)
        if undying:
            tell(f"processes of the job that cannot be killed: {', '.join(map(str, undying))}")


class _Supervisor:
    """Keeps the agents of a job alive, but for those that a fault has taken away."""

    def __init__(self, job: JobPlan, tell: Callable[[str], None]) -> None:
        self._job = job
        self._tell = tell
        self._marks = Marks(job.directory / "plan.json")
        self._port = _free_port()
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self._outputs: dict[int, Path] = {}
        self._pending = [index for index, fault in enumerate(job.faults) if not KINDS[fault.kind].is_of_data]
        self._newest: int | None = None  # of the faults that have fired
        self._explained: set[tuple[int, int]] = set()
        self._num_unexpected = 0
        self._began = self._moved = time.monotonic()
        self._mark = ""  # of its progress
        self._memory: set[int] = set()

    def run(self) -> None:
        self._start(0)
        while self._agents:
            self._look_at_marks()
            self._look_at_agents()
            self._look_at_progress()
            overdue = self._overdue()
            if overdue is not None:
                self._note("job.overdue", reason=overdue)
                leftovers.kill(self._job.directory)
                break
            time.sleep(_POLL_SECONDS)
        for node, agent in self._agents.items():
            self._note("agent.ended", node=node, status=_status(agent))
        self._note("job.ended")
        self._note_leftovers()

    def _look_at_progress(self) -> None:
        """Notice a new step; with the first one of a generation, what memory its agents hold."""
        mark = _read(self._job.directory / "snapshots" / "events.jsonl.progress")
        if mark == self._mark:
            return
        if mark.split()[:2] != self._mark.split()[:2]:  # run and generation
            self._memory.update(*(leftovers.memory(agent.pid) for agent in self._agents.values()))
        self._mark, self._moved = mark, time.monotonic()

    def _overdue(self) -> str | None:
        """Return why the job is to be ended, if it is."""
        now, job = time.monotonic(), self._job
        if now - self._began > job.seconds:
            return f"not finished within {job.seconds:.0f} s"
        if now - self._moved > job.still_seconds:
            return f"no new step within {job.still_seconds:.0f} s"
        return None

    def _look_at_marks(self) -> None:
        """Notice the faults that have fired, and let a node join where one has asked for it."""
        while self._pending and self._marks.are_made(self._pending[0], self._job.faults[self._pending[0]]):
            self._newest = self._pending.pop(0)
            fault = self._job.faults[self._newest]
            self._tell(f"fault {self._newest + 1}: {KINDS[fault.kind].text}; {fault.coordinate}")
            if fault.kind == "grow":
                self._start(max(self._agents, default=-1) + 1)
        if self._newest is not None and self._job.faults[self._newest].kind == "grow" and self._has_found_others():
            self._marks.release_path(self._newest).touch()

    def _has_found_others(self) -> bool:
        """Whether the newcomer has said that it found the rendezvous; it asks to join within milliseconds then."""
        return b"elastic rendezvous at" in self._outputs[max(self._outputs)].read_bytes()

    def _look_at_agents(self) -> None:
        """Start an agent again that has ended before the job was finished, unless it was to leave."""
        for node, agent in sorted(self._agents.items()):
            status = agent.poll()
            if status is None:
                continue
            self._look_at_marks()  # a fault leaves its mark before it acts
            del self._agents[node]
            index = self._cause(node, status) if status != 0 else None
            fault = None if index is None else self._job.faults[index]
            self._note("agent.ended", node=node, status=status, fault=index)
            if fault is None and status != 0:
                self._tell(f"the agent of node {node} ended with status {status}, which no fault explains")
                self._num_unexpected += 1
            elif fault is not None and fault.kind == "damage":
                self._damage(fault)
            is_to_leave = fault is not None and fault.kind == "shrink"
            # A job that was refused would be refused again.
            if status not in {0, EXIT_USAGE} and not is_to_leave and self._num_unexpected <= _NUM_SPARE_STARTS:
                self._start(node)

    def _cause(self, node: int, status: int) -> int | None:
        """Return the fault that explains the end of a node's agent; each explains one end of a node."""
        index = self._newest
        if index is None or (index, node) in self._explained:
            return None
        self._explained.add((index, node))
        return index if status == KINDS[self._job.faults[index].kind].agent_status else None

    def _start(self, node: int) -> None:
        job = self._job
        self._outputs[node] = job.directory / f"output-{len(list(job.directory.glob('output-*')))}-node-{node}.txt"
        with self._outputs[node].open("wb") as output:
            self._agents[node] = subprocess.Popen(
                [*self._launcher(), *job.options],
                cwd=job.directory,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._note("agent.started", node=node)

    def _launcher(self) -> list[str]:
        job = self._job
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            # More than can be needed: what is asked is whether the job recovers, not how often it may.
            f"--max_restarts={3 * len(job.faults) + 3}",
            f"--nnodes=1:{max(2, job.max_nodes)}",
            f"--nproc_per_node={job.num_processes}",
            "--master_addr=127.0.0.1",
            f"--master_port={self._port}",
            "--local_addr=127.0.0.1",
            *("-m", "elastic_mnist"),
        ]

    def _environment(self) -> dict[str, str]:
        environment = {
            **os.environ,
            leftovers.JOB_VARIABLE: str(self._job.directory),
            "TMPDIR": str(self._job.directory / leftovers.TMPDIR),
        }
        if self._job.faults:
            environment[PLAN_VARIABLE] = str(self._job.directory / "plan.json")
            inherited = os.environ.get("PYTHONPATH")
            environment["PYTHONPATH"] = os.pathsep.join([str(_PLANT), *([inherited] if inherited else [])])
        return environment

    def _damage(self, fault: Fault) -> None:
        """Flip a byte of the newest durable snapshot, when nobody is left who might write one."""
        _until(lambda: not leftovers.processes(self._job.directory), _ORPHAN_SECONDS)
        snapshots = self._job.directory / "snapshots"
        committed = sorted(path for path in snapshots.glob("step-*.pt") if path.with_suffix(".json").exists())
        if not committed:
            return
        path = committed[-1]
        offset = path.stat().st_size * fault.argument // 1000
        with path.open("r+b") as file:
            file.seek(offset)
            (byte,) = file.read(1)
            file.seek(offset)
            file.write(bytes([byte ^ 0xFF]))
        self._note("snapshot.damaged", path=str(path), step=int(path.stem.removeprefix("step-")), offset=offset)

    def _note_leftovers(self) -> None:
        def left() -> dict[str, list[str]]:
            return {
                "processes": [str(pid) for pid in leftovers.processes(self._job.directory)],
                "shared_memory": leftovers.holders(self._memory),
                "temporary_files": leftovers.temporary_files(self._job.directory),
            }

        _until(lambda: not any(left().values()), LEFTOVER_SECONDS)
        self._note("leftovers", **left())

    def _note(self, note: str, **facts: object) -> None:
        with (self._job.directory / NOTES).open("a") as file:
            file.write(json.dumps({"time": time.time(), "note": note, **facts}) + "\n")


def _free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _status(agent: "subprocess.Popen[bytes]") -> int | None:
    """Return the exit status of an agent that was killed; None where it does not end."""
    try:
        return agent.wait(leftovers.KILL_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

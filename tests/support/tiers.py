"""What the tests of the two tiers share: faults at coordinates, several in one job, and a rendezvous of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from harness import SMALL, Event, Job, alive, eventually, plain, torchrun
from typing_extensions import Self

# 6 steps, the third and the last one short.
SHORT = ("--train_samples=150", "--test_samples=50", "--global_batch_size=64", "--micro_batch_size=24", "--epochs=2")

# 24 steps, one epoch.
ONE_EPOCH = (
    *("--train_samples=1500", "--test_samples=300", "--global_batch_size=64", "--micro_batch_size=24"),
    *("--epochs=1", "--save_every_steps=5", "--sample_log=../ledger"),
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens at a coordinate of a job.

    Attributes:
        kind: "kill" and "stop" send the worker that signal. "sleep" takes `seconds`. "hold" waits for `let_go`, or for
            a request to stop, as a worker gets one when a node comes.
        place: at the beginning of a "step" or of an "evaluation"; before a "keep" in the memory tier, whose step counts
            the one just made; half-way in the "write" of a durable snapshot's data.
        ranks: where.
        step: number of finished steps; None for any.
        generation: None for any.
    """

    kind: Literal["kill", "stop", "sleep", "hold"]
    place: Literal["step", "evaluation", "keep", "write"]
    ranks: tuple[int, ...]
    step: int | None
    generation: int | None = 0
    seconds: float = 0.0


class Plan:
    """Faults of one job, and the proof that they fired.

    Args:
        directory: where the proofs lie.
        faults: in the order in which `fired` knows them.
        has_pauses: whether a failed write is tried again only after a while.
    """

    def __init__(self, directory: Path, *faults: Fault, has_pauses: bool = True) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._files = [directory / f"fault-{number}" for number in range(len(faults))]
        planted = [{**asdict(fault), "file": str(file)} for fault, file in zip(faults, self._files, strict=True)]
        (directory / "sitecustomize.py").write_text("import tier_faults\n")  # the name that Python looks for
        paths = (str(directory), str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH"))
        self.environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "ELASTIC_MNIST_TIER_FAULTS": json.dumps(planted),
            **({} if has_pauses else {"ELASTIC_MNIST_TIER_NO_PAUSES": "1"}),
        }

    def fired(self, number: int = 0) -> list[tuple[str, int, int, int | None]]:
        """Return what a fault noted: "begins" or "ended", rank, step of the coordinate, steps finished by then."""
        try:
            lines = self._files[number].read_text().splitlines()
        except FileNotFoundError:
            return []
        words = [line.split() for line in lines]
        return [(what, int(rank), int(step), None if at == "None" else int(at)) for what, rank, step, at in words]

    def wait(self, number: int = 0) -> None:
        """Wait until a fault fires."""
        eventually(lambda: self.fired(number), what=f"fault {number}")

    def let_go(self, number: int = 0) -> None:
        """End a hold."""
        self._files[number].with_name(self._files[number].name + ".go").touch()


class RendezvousStore:
    """A process that serves a rendezvous' store and nothing else, so that any agent may be lost."""

    def __enter__(self) -> Self:
        """Serve at a free port."""
        program = (
            "from torch.distributed import TCPStore\n"
            "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
            "print(store.port, flush=True)\n"
            "input()\n"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        with self._process:
            self._process.kill()

    def agent(
        self,
        directory: Path,
        data_dir: Path,
        options: Sequence[str],
        environment: dict[str, str] | None = None,
        *,
        max_nodes: int = 2,
    ) -> Job:
        """Start an agent with one worker that meets the others here."""
        line = (
            *("--max_restarts=3", f"--nnodes=1:{max_nodes}", "--rdzv_backend=c10d", "--rdzv_id=tiers"),
            *(f"--rdzv_endpoint=127.0.0.1:{self.port}", "--rdzv_conf=is_host=false"),
        )
        return Job(directory, data_dir, torchrun(*line), options, environment)


def undisturbed(directory: Path, data_dir: Path, options: Sequence[str] = SMALL) -> Event:
    """Return the end of a job that nobody touches."""
    with Job(directory, data_dir, plain(), options) as job:
        return job.finish()


def wait_until_gone(processes: Sequence[Any], *, within: float = 30.0) -> None:
    """Wait until none of some processes lives."""
    eventually(lambda: not any(map(alive, processes)), within=within, what=f"the end of {processes}")

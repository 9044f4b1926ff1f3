"""A job of several nodes that takes its time, for tests of what befalls nodes; one worker each, all on one host.

Its steps wait more than they compute, so that a node can come at leisure, on a busy machine too. `finish` makes what
is left of it in one process, without the waiting.
"""

import json
from collections.abc import Callable
from pathlib import Path

import psutil
from harness import Job, eventually, fault, plain, torchrun

from elastic_mnist.cli import audit

NUM_STEPS = 200
HANG_SECONDS = 5
PACED = (
    "--dataset=synthetic",
    "--train_samples=800",
    "--test_samples=60",
    "--global_batch_size=4",
    "--micro_batch_size=2",
    "--epochs=1",
    "--save_every_steps=20",
    "--sample_log=ledger",
    f"--hang_timeout={HANG_SECONDS}",
)

GO_ON_SECONDS = 30.0
"""A node that has lost another one trains again within that time: 7 s on a quiet machine, of which 5 are the patience
for a node's heartbeat."""

TOGETHER_SECONDS = 8
TOGETHER = f"--rdzv_conf=last_call_timeout={TOGETHER_SECONDS}"
"""Nodes that are started together meet in the first generation, if the second comes within that time; but one that has
lost the other waits as long for another."""

END_SECONDS = 30.0
"""A node that has lost the rendezvous ends within that time; 2 s on a quiet machine."""


def node(
    directory: Path,
    *options: str,
    address: str = "127.0.0.1",
    max_restarts: int = 3,
    before: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
) -> Job:
    """Start one node of the job.

    Args:
        directory: of the job; its nodes share it.
        options: torchrun's, where the rendezvous is.
        address: this node's; torchrun numbers nodes in the order of their addresses.
        max_restarts: of this node.
        before: what comes before torchrun's command.
        environment: on top of this process's own.
    """
    paced, _ = fault(directory, "none", rank=0, step=0)
    paced["ELASTIC_MNIST_TEST_CRAWL"] = "0.8"
    line = (f"--max_restarts={max_restarts}", "--nnodes=1:2", *options, f"--local_addr={address}")
    return Job(directory, directory, (*before, *torchrun(*line)), PACED, {**paced, **(environment or {})})


def undisturbed(directory: Path) -> str:
    """Return the weights' digest when one process does it all."""
    with Job(directory, directory, plain(), PACED) as job:
        return str(job.finish()["weights_sha256"])


def finish(directory: Path) -> str:
    """Make what is left of a job whose nodes are gone, audit all of it, and return the weights' digest."""
    with Job(directory, directory, plain(), PACED) as job:
        finished = job.finish()
    assert finished["step"] == NUM_STEPS
    assert audit.run(directory / "ledger", event_log=None, run_id=None) == 0
    return str(finished["weights_sha256"])


def wait_for_world(
    job: Job, size: int, *, after: int, within: float, meanwhile: Callable[[], None] = lambda: None
) -> int:
    """Wait until a generation after `after`, of so many nodes, has made a step; return the generation."""

    def is_at_work() -> tuple[int] | None:
        meanwhile()
        generation, step = job.progress()
        starts = [event for event in job.events("run.started") if event["generation"] == generation > after]
        is_it = starts and starts[0]["world_size"] == size and step > starts[0]["step"]
        return (generation,) if is_it else None

    what = f"{size} nodes at work after generation {after}"
    return eventually(is_at_work, within=within, what=what)[0]


def stop(job: Job) -> list[psutil.Process]:
    """Let a whole node stand still, its agent and its worker; return them."""
    processes = [psutil.Process(job.process.pid), *job.workers()]
    for process in processes:
        process.suspend()
    eventually(lambda: all(process.status() == psutil.STATUS_STOPPED for process in processes))
    return processes


def check_one_writer(job: Job) -> None:
    """Check that no generation has gone on, or saved anything, once the next one had begun."""
    names = {"run.started", "train.progress", "snapshot.saved", "epoch.finished"}
    generations = [event["generation"] for event in job.events() if event["event"] in names]
    assert generations == sorted(generations)


class Place:
    """The place of a job's snapshots, looked at again and again: what it tells never goes back."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "snapshots"
        self._generation = self._step = -1

    def look(self) -> None:
        """Check that neither the record's generation nor the newest snapshot's step has gone back."""
        generation = json.loads((self._directory / "run.json").read_text())["generation"]
        steps = [int(path.stem.removeprefix("step-")) for path in self._directory.glob("step-*.json")]
        step = max(steps, default=-1)
        assert generation >= self._generation
        assert step >= self._step
        self._generation, self._step = generation, step

"""What the snapshots cost the training: memory tier and durable tier against none, in one interleaved run.

    scripts/bench snapshots [--steps 40] [--rounds 8] [--directory DIRECTORY]

Two processes make full-size steps with the parts of a real job. First, steps that keep a copy in the memory tier
alternate with steps that do not. Then, blocks of 10 steps alternate: without a snapshot, and with one that is taken
after the first step, in four ways: `background` is ours (the durable tier with its claim, digests, read-back and
retention), `synchronous` is torch.save with fsync by rank 0 while the others wait, `async_save` is
torch.distributed.checkpoint's. A block ends when its snapshot is safe. Printed are ratios as the median over
neighbours, and their spread: of the time, and of the CPU time of both processes, which others disturb less. What a
snapshot costs while nothing else is done is measured too; where other programs share the cores, it tells more.
"""

import argparse
import logging
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from elastic_mnist.ipc.environment import WorkerEnvironment
from elastic_mnist.settings import Settings
from elastic_mnist.telemetry import events
from elastic_mnist.worker.checkpointer import TieredCheckpointer
from elastic_mnist.worker.context import WorkerContext
from elastic_mnist.worker.malloc import tune_malloc
from elastic_mnist.worker.setup import build_trainer
from elastic_mnist.worker.start import agree_on_start
from elastic_mnist.worker.stop_requests import StopRequests

if TYPE_CHECKING:
    from elastic_mnist.training.sampler import Step

BLOCK = 10  # steps between two snapshots


@dataclass
class Cost:
    """What something has cost, time after time, in milliseconds."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


class Bench:
    """A training that is driven step by step."""

    def __init__(self, directory: Path) -> None:
        settings = Settings(
            dataset="synthetic",
            train_samples=16 * 1024,
            test_samples=64,
            snapshot_path=str(directory / "durable"),
            event_log=directory / "events.jsonl",
        )
        events.configure(None, rank=int(os.environ["RANK"]), world_size=2, log_format="json")
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
        # The agent would hold the memory; for the copy it is one whoever does.
        memory_path = f"/proc/{os.getpid()}/fd/{os.memfd_create('bench')}"
        tune_malloc()
        env = replace(WorkerEnvironment.from_environment(), memory_path=memory_path)
        context = WorkerContext(settings, env, StopRequests())
        start = agree_on_start(context)
        self.checkpointer = TieredCheckpointer(context, start)
        self.trainer = build_trainer(context, start, None, self.checkpointer)
        self._directory = directory
        self._num_saved = 0
        group = dist.new_group(backend="gloo")  # the training's own collectives go on meanwhile
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        self._steps: Iterator[Step] = iter(())
        self.rank = context.world.rank

    def step(self, *, keeps: bool) -> None:
        """Make a step as the trainer does."""
        trainer = self.trainer
        if trainer.position.samples_in_epoch == 0:
            self._steps = iter(trainer.remaining_steps())
        step = next(self._steps)
        trainer.begin_step()
        trainer.gradient(step, step_index=trainer.position.step)
        trainer.optimizer.step()
        trainer.position = trainer.position.after(step, trainer.num_samples)
        if keeps:
            self.checkpointer.save_to_memory(trainer)
        self.checkpointer.record_step(trainer.position.step)

    def background(self) -> Callable[[], Any]:
        """Begin to write a durable snapshot; return what waits for it."""
        self.trainer.save()
        return self.checkpointer.flush

    def synchronous(self) -> Callable[[], Any]:
        """Write a snapshot as most scripts do, made safe by fsync and a rename."""
        path = self._next_path()
        if self.rank == 0:
            with path.with_suffix(".tmp").open("wb") as file:
                torch.save(self._state(), file)
                file.flush()
                os.fsync(file.fileno())
            path.with_suffix(".tmp").replace(path)
        dist.barrier()
        return lambda: None

    def async_save(self) -> Callable[[], Any]:
        """Begin to write a snapshot with torch.distributed.checkpoint."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            future = dcp.async_save(self._state(), checkpoint_id=str(self._next_path()), process_group=self._group)
        assert not isinstance(future, dict)
        return future.result  # type: ignore[union-attr]

    def none(self) -> Callable[[], Any]:
        """Write nothing."""
        return lambda: None

    def tidy(self) -> None:
        """Remove what the other ways wrote; ours has retention."""
        dist.barrier()
        if self.rank == 0:
            for path in self._directory.glob("other-*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        dist.barrier()

    def _state(self) -> dict[str, Any]:
        return {"model": self.trainer.model.state_dict(), "optimizer": self.trainer.optimizer.state_dict()}

    def _next_path(self) -> Path:
        self._num_saved += 1
        return self._directory / f"other-{self._num_saved}"


def measure(cost: Cost, run: Callable[[], Any]) -> None:
    """Note what something costs from the moment that all ranks begin, in CPU time of all ranks."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    spent = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu])
    gathered = [torch.empty_like(spent) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, spent)
    cost.wall.append(max(float(one[0]) for one in gathered) * 1e3)
    cost.cpu.append(sum(float(one[1]) for one in gathered) * 1e3)


def measure_memory(bench: Bench, num_steps: int) -> None:
    """Compare steps that keep a copy with steps that do not."""
    plain, kept, copying = Cost(), Cost(), Cost()
    for index in range(num_steps):
        for keeps in (False, True) if index % 2 else (True, False):
            measure(kept if keeps else plain, lambda keeps=keeps: bench.step(keeps=keeps))  # type: ignore[misc]
        measure(copying, lambda: bench.checkpointer.save_to_memory(bench.trainer))
    if bench.rank == 0:
        print(f"memory tier: {num_steps} pairs of steps of {bench.trainer.global_batch_size} samples")
        print(f"  a step {statistics.median(plain.wall):.1f} ms, the copy alone {spread(copying.wall)} ms")
        low, median, high = statistics.quantiles(
            [one / step for one, step in zip(copying.wall, plain.wall, strict=True)], n=4
        )
        print(f"  the copy alone / a step: median {median:.4f}, quartiles {low:.4f} to {high:.4f}")
        tell_ratios("a step with a copy / one without", kept, plain)


def measure_durable(bench: Bench, num_rounds: int) -> None:
    """Compare blocks of steps with a snapshot each, written in several ways, with blocks without one."""
    ways: dict[str, Callable[[], Callable[[], Any]]] = {
        name: getattr(bench, name) for name in ("none", "background", "synchronous", "async_save")
    }
    costs = {name: Cost() for name in ways}
    pauses = {name: Cost() for name in ways}

    def block(name: str) -> None:
        bench.step(keeps=True)
        began = time.perf_counter()
        settle = ways[name]()
        pauses[name].wall.append((time.perf_counter() - began) * 1e3)
        for _ in range(BLOCK - 1):
            bench.step(keeps=True)
        settle()

    names = [*ways]
    alone = {name: Cost() for name in ways}
    for name in names[1:]:  # first of its kind: imports, threads, process groups
        ways[name]()()
    for index in range(num_rounds):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            measure(costs[name], lambda name=name: block(name))  # type: ignore[misc]
            bench.tidy()
        for name in names[1:]:
            bench.step(keeps=True)  # a snapshot is written once
            measure(alone[name], lambda name=name: ways[name]()())  # type: ignore[misc]
            bench.tidy()
    if bench.rank == 0:
        print(f"durable tier: {num_rounds} rounds of blocks of {BLOCK} steps with one snapshot each")
        print(f"  a block without: {spread(costs['none'].wall)} ms")
        for name in names[1:]:
            print(f"  {name}: the training waits {spread(pauses[name].wall)} ms")
            share = statistics.median(alone[name].cpu) / statistics.median(costs["none"].cpu)
            print(
                f"  {name} alone: {spread(alone[name].wall)} ms, of CPU time {spread(alone[name].cpu)} ms, which is "
                f"{share:.4f} of a block's"
            )
            tell_ratios(f"a block with {name} / one without", costs[name], costs["none"])


def tell_ratios(what: str, these: Cost, those: Cost) -> None:
    """Print the median of the ratios of neighbours, and how far it may be off."""
    for kind in ("wall", "cpu"):
        ratios = [one / other for one, other in zip(getattr(these, kind), getattr(those, kind), strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        # The standard error of a median is 1.25 of the mean's; 1.35 standard deviations lie between the quartiles.
        error = 1.25 * (high - low) / 1.35 / math.sqrt(len(ratios))
        name = {"wall": "time", "cpu": "CPU time"}[kind]
        print(f"  {what}, {name}: median {median:.4f} +- {error:.4f}, quartiles {low:.4f} to {high:.4f}")


def spread(values: list[float]) -> str:
    """Return median and quartiles."""
    low, median, high = statistics.quantiles(values, n=4)
    return f"{median:.1f} ({low:.1f} to {high:.1f})"


def main() -> None:
    """Start the two processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="pairs of steps, for the memory tier")
    parser.add_argument("--rounds", type=int, default=8, help="blocks of each kind, for the durable tier")
    parser.add_argument("--directory", type=Path, default=None, help="where snapshots go; a temporary directory")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
            arguments = [f"--steps={options.steps}", f"--rounds={options.rounds}", f"--directory={directory}"]
            subprocess.run([*launcher, __file__, *arguments], check=True)
        return
    bench = Bench(options.directory)
    for _ in range(2):  # the first steps pay for the caches
        bench.step(keeps=True)
    measure_memory(bench, options.steps)
    measure_durable(bench, options.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

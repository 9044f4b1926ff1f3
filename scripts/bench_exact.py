"""What exactness costs: `exact` against a plain fp32 sum of the same micro-batches, in one interleaved run.

    scripts/bench exact [--steps 20] [--world_sizes 1 2] [--starts 5]

Both variants compute the same micro-batches on the same lanes and make the same optimizer step. `plain` adds the
gradients up in fp32 and all-reduces that; `exact` checks, converts, adds and all-reduces int64. They alternate step
by step, so that the machine's noise meets both. Printed are medians of a step's parts, and ratios as the median over
neighbouring pairs: of the steps, and of their CPU time, which other processes disturb less. Where a process's memory
happens to lie is worth a percent, so each world size is measured in several processes, one after the other.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_mnist.training import model
from elastic_mnist.training.gradients import ExactGradient, Objective, StepResult
from elastic_mnist.training.pool import MicroBatchPool
from elastic_mnist.training.sampler import MicroBatch, Step, StepSampler
from elastic_mnist.worker.malloc import tune_malloc

MICRO_BATCH = 64


class PlainSum:
    """Adds fp32 vectors up as they are."""

    def __init__(self, total: Tensor) -> None:
        self.total = total
        self.clear()

    def clear(self) -> None:
        """Begin a new sum."""
        self._is_empty = True

    def add(self, pieces: Sequence[Tensor]) -> None:
        """Add the vector that the flattened pieces form."""
        vectors = [piece.reshape(-1) for piece in pieces]
        for vector, total in zip(vectors, self.total.split([len(vector) for vector in vectors]), strict=True):
            if self._is_empty:
                total.copy_(vector)
            else:
                total.add_(vector)
        self._is_empty = False


class PlainGradient(ExactGradient):
    """The same micro-batches, lanes and message, in fp32; a lane has its own sum, or two runs would differ."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:  # noqa: ANN401 - as `ExactGradient` takes them
        super().__init__(*arguments, **keywords)
        self._message = self._message.float()
        self._values = self._message[: len(self._values)]
        self.sums = [
            PlainSum(self._values if lane == 0 else self._values.clone()) for lane in range(self._pool.num_threads)
        ]

    def __call__(self, step: Step, *, step_index: int) -> StepResult:
        """Compute and add up."""
        for total in self.sums:
            total.clear()

        def compute(lane: int, micro_batch: MicroBatch) -> None:
            loss = self._objective.loss(micro_batch, epoch=step.epoch, step_index=step_index)
            loss.item()  # which any trainer reports
            self.sums[lane].add(torch.autograd.grad(loss, self._parameters))

        self._pool.run(compute, step.micro_batches)
        num_parts = self._pool.num_threads
        first, *others = [total.total.chunk(num_parts) for total in self.sums]
        for other in others:
            self._pool.run(lambda _lane, pair: pair[0].add_(pair[1]), zip(first, other, strict=True))
        self._all_reduce(self._message)
        self._pool.run(
            lambda _lane, pair: torch.mul(pair[0], 1.0 / step.num_samples, out=pair[1]),
            zip(first, self._gradient.chunk(num_parts), strict=True),
        )
        return StepResult(loss_sum=0.0, num_bad=0)


class Variant:
    """One of the two, with what its steps have cost so far, in milliseconds.

    Both work on the same network, data and optimizer: where these happen to lie in memory is worth one percent.
    """

    def __init__(
        self, kind: type[ExactGradient], objective: Objective, pool: MicroBatchPool, step: Step, world_size: int
    ) -> None:
        self._world_size = world_size
        self._step = step
        self._gradient = kind(
            objective, pool, self._all_reduce, global_batch_size=step.num_samples, micro_batch_size=MICRO_BATCH
        )
        if isinstance(self._gradient, PlainGradient):
            for total in self._gradient.sums:
                vars(total)["add"] = self._timed(total.add, lambda _pieces: 1)
        else:
            vars(self._gradient._sum)["add_all"] = self._timed(self._gradient._sum.add_all, len)
        self._parameters = list(objective.model.parameters())
        self._grads = [parameter.grad for parameter in self._parameters]
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.adding: list[float] = []  # CPU time of a micro-batch's
        self.reducing: list[float] = []

    def _all_reduce(self, tensor: Tensor) -> None:
        began = time.perf_counter()
        if self._world_size > 1:
            dist.all_reduce(tensor)
        self.reducing.append((time.perf_counter() - began) * 1e3)

    def _timed(self, add: Callable[[Any], Any], count: Callable[[Any], int]) -> Callable[[Any], Any]:
        def timed_add(what: Any) -> object:  # noqa: ANN401 - a vector, or several
            began = time.thread_time()
            result = add(what)
            if what:
                self.adding.append((time.thread_time() - began) * 1e3 / count(what))
            return result

        return timed_add

    def once(self, optimizer: torch.optim.Optimizer) -> None:
        """Make a step."""
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            parameter.grad = grad
        wall, cpu = time.perf_counter(), time.process_time()
        self._gradient(self._step, step_index=0)
        optimizer.step()
        self.cpu.append((time.process_time() - cpu) * 1e3)
        self.wall.append((time.perf_counter() - wall) * 1e3)

    def forget(self) -> None:
        """Forget what the first steps have cost: they pay for the caches."""
        for costs in (self.wall, self.cpu, self.adding, self.reducing):
            costs.clear()


def measure(num_steps: int, world_size: int, rank: int, results: Path) -> None:
    """Run both variants in turn; print what rank 0 saw, and add its ratios to the results."""
    tune_malloc()
    pool = MicroBatchPool(max(1, len(os.sched_getaffinity(0)) // world_size))
    num_samples = 512 * world_size
    objective = Objective(
        model=model.build(0),
        images=torch.randint(0, 256, (num_samples, 28, 28), dtype=torch.uint8),
        labels=torch.randint(0, 10, (num_samples,)),
        seed=0,
        device=torch.device("cpu"),
        precision="fp32",
    )
    (step,) = StepSampler(
        num_samples,
        seed=0,
        epoch=0,
        global_batch_size=num_samples,
        micro_batch_size=MICRO_BATCH,
        rank=rank,
        world_size=world_size,
    )
    exact, plain = (Variant(kind, objective, pool, step, world_size) for kind in (ExactGradient, PlainGradient))
    optimizer = torch.optim.Adam(objective.model.parameters(), lr=1e-3)
    for index in range(num_steps + 2):
        if index == 2:
            exact.forget()
            plain.forget()
        for variant in (exact, plain) if index % 2 else (plain, exact):
            if world_size > 1:
                dist.barrier()  # a step begins together, or it would measure the other's rest
            variant.once(optimizer)
    if rank == 0:
        print(
            f"world size {world_size}, {pool.num_threads} threads, {num_steps} pairs of steps of {num_samples} samples"
        )
        tell("exact", exact)
        tell("plain", plain)
        ratios = {"step": ratios_of(exact.wall, plain.wall), "CPU time": ratios_of(exact.cpu, plain.cpu)}
        for what, values in ratios.items():
            tell_ratio(what, values)
        with results.open("a") as file:
            file.write(json.dumps(ratios) + "\n")


def tell(name: str, variant: Variant) -> None:
    """Print the medians of a variant's costs."""
    step, cpu, adding, reducing = map(statistics.median, (variant.wall, variant.cpu, variant.adding, variant.reducing))
    print(
        f"  {name}: step {step:6.1f} ms, waiting in the all-reduce {reducing:4.1f} ms; CPU time {cpu:6.1f} ms, "
        f"adding a micro-batch {adding:4.2f} ms"
    )


def ratios_of(exact: list[float], plain: list[float]) -> list[float]:
    """Return the ratios of neighbours."""
    return [one / other for one, other in zip(exact, plain, strict=True)]


def tell_ratio(what: str, ratios: list[float]) -> None:
    """Print the median of ratios, and how far it may be off."""
    low, median, high = statistics.quantiles(ratios, n=4)
    # The standard error of a median is 1.25 of the mean's; 1.35 standard deviations lie between the quartiles.
    error = 1.25 * (high - low) / 1.35 / math.sqrt(len(ratios))
    print(f"  exact / plain, {what}: median {median:.4f} +- {error:.4f}, quartiles {low:.4f} to {high:.4f}")


def tell_all(world_size: int, results: Path) -> None:
    """Print what all starts at a world size have found together."""
    starts = [json.loads(line) for line in results.read_text().splitlines()]
    print(f"world size {world_size}, all {len(starts)} starts")
    for what in starts[0]:
        medians = sorted(statistics.median(start[what]) for start in starts)
        tell_ratio(what, [ratio for start in starts for ratio in start[what]])
        print(f"    medians of the starts: {' '.join(f'{median:.4f}' for median in medians)}")


def main() -> None:
    """Start the processes of each world size in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="pairs of steps")
    parser.add_argument("--world_sizes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--starts", type=int, default=5, help="of each world size")
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.results is not None:
        dist.init_process_group("gloo")
        measure(options.steps, dist.get_world_size(), dist.get_rank(), options.results)
        dist.destroy_process_group()
        return
    for world_size in options.world_sizes:
        with tempfile.TemporaryDirectory() as directory:
            results = Path(directory) / "results"
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
            # Of several processes torchrun gives each one thread, and says so at length; the lanes set that anyway.
            environment = {"OMP_NUM_THREADS": "1", **os.environ}
            for _ in range(options.starts):
                command = [*launcher, __file__, "--steps", str(options.steps), "--results", str(results)]
                subprocess.run(command, check=True, env=environment)
            tell_all(world_size, results)


if __name__ == "__main__":
    main()

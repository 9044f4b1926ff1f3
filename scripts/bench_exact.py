"""What exactness costs: `exact` against a plain fp32 sum of the same micro-batches, in one interleaved run.

    scripts/bench exact [--steps 30] [--world_sizes 1 2]

Both variants compute the same micro-batches on the same lanes and make the same optimizer step. `plain` adds the
gradients up in fp32 and all-reduces that; `exact` checks, converts, adds and all-reduces int64. They alternate step
by step, so that the machine's noise meets both. Printed are medians of a step's parts, and the ratio of the steps as
the median over neighbouring pairs.
"""

import argparse
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_mnist import model
from elastic_mnist.fixed_point import FixedPointSum
from elastic_mnist.gradients import ExactGradient, Problem, StepResult
from elastic_mnist.lanes import Lanes
from elastic_mnist.sampler import MicroBatch, Step, StepSampler


class PlainSum(FixedPointSum):
    """The vectors are added up in fp32, as they are."""

    def __init__(self, total: Tensor) -> None:
        super().__init__(total, norm_limit=math.inf)

    def add(self, pieces: Sequence[Tensor]) -> None:
        """Add the vector that the flattened pieces form."""
        start = 0
        for piece in pieces:
            total = self._total[start : start + piece.numel()]
            if self._is_empty:
                total.copy_(piece.reshape(-1))
            else:
                total.add_(piece.reshape(-1))
            start += piece.numel()
        self._is_empty = False


class PlainGradient(ExactGradient):
    """The same micro-batches, lanes and message, in fp32."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:  # noqa: ANN401 - as `ExactGradient` takes them
        super().__init__(*arguments, **keywords)
        self._message = self._message.float()
        self._values = self._message[: len(self._values)]
        self._sums = [PlainSum(self._values if lane == 0 else self._values.clone()) for lane in range(len(self._sums))]

    def __call__(self, step: Step, *, step_index: int) -> StepResult:
        """Compute and add up."""
        for total in self._sums:
            total.clear()

        def compute(lane: int, micro_batch: MicroBatch) -> None:
            loss = self._problem.loss(micro_batch, epoch=step.epoch, step_index=step_index)
            self._sums[lane].add(torch.autograd.grad(loss, self._parameters))
            loss.item()  # which any trainer reports

        self._lanes.run(compute, step.micro_batches)
        first, *others = self._sums
        for other in others:
            first.total.add_(other.total)
        self._all_reduce(self._message)
        torch.mul(self._values, 1.0 / step.num_samples, out=self._gradient)
        return StepResult(loss_sum=0.0, num_bad=0)


def measure(num_steps: int, world_size: int, rank: int) -> None:
    """Run both variants in turn and print what rank 0 saw."""
    lanes = Lanes(max(1, len(os.sched_getaffinity(0)) // world_size))
    images = torch.randint(0, 256, (512 * world_size, 28, 28), dtype=torch.uint8)
    labels = torch.randint(0, 10, (512 * world_size,))
    spent = {"all-reduce": 0.0}

    def all_reduce(tensor: Tensor) -> None:
        began = time.perf_counter()
        if world_size > 1:
            dist.all_reduce(tensor)
        spent["all-reduce"] += time.perf_counter() - began

    variants: dict[str, Callable[[], None]] = {}
    for name, kind in (("exact", ExactGradient), ("plain", PlainGradient)):
        network = model.build(0)
        problem = Problem(
            model=network, images=images, labels=labels, seed=0, device=torch.device("cpu"), precision="fp32"
        )
        gradient = kind(problem, lanes, all_reduce, global_batch_size=512 * world_size, micro_batch_size=64)
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
        (step,) = StepSampler(
            len(labels),
            seed=0,
            epoch=0,
            global_batch_size=512 * world_size,
            micro_batch_size=64,
            rank=rank,
            world_size=world_size,
        )

        def once(
            gradient: ExactGradient = gradient, step: Step = step, optimizer: torch.optim.Adam = optimizer
        ) -> None:
            gradient(step, step_index=0)
            optimizer.step()

        variants[name] = once
    times: dict[str, list[float]] = {"exact": [], "plain": []}
    reduces: dict[str, list[float]] = {"exact": [], "plain": []}
    for index in range(2 * num_steps + 4):
        name = ("exact", "plain", "plain", "exact")[index % 4]
        if world_size > 1:
            dist.barrier()  # a step begins together, or it would measure the other's rest
        spent["all-reduce"] = 0.0
        began = time.perf_counter()
        variants[name]()
        if index >= 4:  # the first ones pay for the caches
            times[name].append((time.perf_counter() - began) * 1e3)
            reduces[name].append(spent["all-reduce"] * 1e3)
    if rank == 0:
        report(times, reduces, world_size, lanes.num_lanes)


def report(times: dict[str, list[float]], reduces: dict[str, list[float]], world_size: int, num_lanes: int) -> None:
    """Print medians and the ratio."""
    ratios = [exact / plain for exact, plain in zip(times["exact"], times["plain"], strict=True)]
    print(f"world size {world_size}, {num_lanes} lanes, {len(ratios)} pairs of steps of {512 * world_size} samples")
    for name, steps in times.items():
        step, reduce = statistics.median(steps), statistics.median(reduces[name])
        print(f"  {name:6} step {step:8.1f} ms   of it waiting in the all-reduce {reduce:7.1f} ms")
    quarter = statistics.quantiles(ratios, n=4)
    print(f"  exact / plain: median {quarter[1]:.4f}, quartiles {quarter[0]:.4f} to {quarter[2]:.4f}")
    print(f"  conversion alone, a micro-batch: {conversion_ms():.2f} ms")


def conversion_ms() -> float:
    """Return the median time that fixed point adds to a micro-batch's sum."""
    pieces = [parameter.detach() * 0.01 for parameter in model.build(0).parameters()]
    num_values = sum(piece.numel() for piece in pieces)
    exact = FixedPointSum(torch.zeros(num_values, dtype=torch.int64), norm_limit=2.0**62)
    plain = PlainSum(torch.zeros(num_values))
    extra = []
    for _ in range(50):
        began = time.perf_counter()
        exact.add(pieces)
        middle = time.perf_counter()
        plain.add(pieces)
        extra.append((middle - began) - (time.perf_counter() - middle))
    return statistics.median(extra) * 1e3


def main() -> None:
    """Start the processes of each world size in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="pairs of steps")
    parser.add_argument("--world_sizes", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        measure(options.steps, dist.get_world_size(), dist.get_rank())
        dist.destroy_process_group()
        return
    for world_size in options.world_sizes:
        if world_size == 1:
            measure(options.steps, 1, 0)
            continue
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
        subprocess.run([*launcher, __file__, "--steps", str(options.steps)], check=True)


if __name__ == "__main__":
    main()

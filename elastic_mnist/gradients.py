"""One gradient out of many micro-batches, the same bits however the work is divided.

Floating-point addition is not associative: the sum of the micro-batches' gradients depends on the
order of the additions, and that order on who computed what. Integer addition has no order. So each
micro-batch's fp32 gradient is turned into fixed-point int64 and added there; sums within a lane, over
lanes, over ranks, by gloo or by NCCL, are then all the same sum, down to the last bit.

The scale, a power of two
    A micro-batch of at most b samples adds the gradient of the *sum* of its losses. With M micro-batches
    in a step and 2^62 as the room of an int64 (one bit kept as margin, one for the sign), a value may
    reach 2^62 / M without any sum of M of them overflowing. We admit a norm of 2^10 for the mean gradient
    of a micro-batch, hence |value| < 2^10 b, and scale by the largest power of two that fits:

        2^10 * b * M * 2^exponent <= 2^62

    The bound is checked, not hoped for: the 2-norm of every micro-batch's gradient, one dot product over
    the flat buffer, must lie below 2^10 b. The norm bounds each element, and NaN and infinity fail the
    comparison too. So overflow cannot happen, and what is not finite is found before it is added.

The error
    Scaling by a power of two is exact. Conversion to int64 truncates: less than one unit, 2^-exponent,
    for each micro-batch, so the step's mean gradient over n samples is off by less than

        M * 2^-exponent / n

    from the exact sum of the micro-batches' fp32 gradients; at the defaults (b = 64, M = 8, n = 512) the
    exponent is 43, the bound 1.8e-15. A fp32 sum rounds by 2^-24 of its value: fixed point is finer for
    every element above 3e-8. The conversion back to fp32 rounds once.
"""

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import nll_loss

from elastic_mnist.lanes import Lanes
from elastic_mnist.model import ConvNet, normalise
from elastic_mnist.sampler import MicroBatch, Step

MEAN_NORM_LIMIT_BITS: Final = 10
_ROOM_BITS: Final = 62
_BLOCK_VALUES: Final = 2**16  # 1.3 MB of fp32, int64 and their sum: within a core's own cache
_LOSS_EXPONENT: Final = 24  # of the losses' own fixed point: 6e-8 of a nat for each micro-batch

# Integers that travel behind the gradient in the same all-reduce.
_LOSS, _BAD, _STOP = range(3)
_NUM_EXTRAS: Final = 3


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What all ranks know after a step's gradient; the same at each of them.

    Attributes:
        loss_sum: of the step's samples, over all ranks.
        num_bad: micro-batches whose gradient was not finite, or beyond the limit of the fixed point.
        num_stops: ranks that have been asked to stop.
    """

    loss_sum: float
    num_bad: int
    num_stops: int


class GradientSync(Protocol):
    """Fills the parameters' `.grad` with the mean gradient of a step."""

    def __call__(self, step: Step, *, step_index: int, stop: bool = False) -> StepResult:
        """Compute and agree. Every rank must call this, also with no micro-batch of its own.

        Args:
            step: the step, with this rank's micro-batches.
            step_index: number of steps finished before it; seeds its randomness.
            stop: whether this rank has been asked to stop; carried to all ranks.
        """
        ...


class AllReduce(Protocol):
    """Adds a tensor up over all ranks, in place."""

    def __call__(self, tensor: Tensor) -> None:
        """Every rank must call this."""
        ...


def choose_exponent(micro_batch_size: int, num_micro_batches: int) -> int:
    """Return the exponent of the scale; see the module's docstring."""
    return math.floor(_ROOM_BITS - MEAN_NORM_LIMIT_BITS - math.log2(micro_batch_size * num_micro_batches))


def error_bound(micro_batch_size: int, num_micro_batches: int, num_samples: int) -> float:
    """Return the largest error of an element of the mean gradient before it is rounded to fp32."""
    return num_micro_batches * 2.0 ** -choose_exponent(micro_batch_size, num_micro_batches) / num_samples


def micro_batch_seed(seed: int, epoch: int, step_index: int, micro_batch: int) -> int:
    """Return the 63-bit seed of a micro-batch's randomness: its coordinates, and nothing else."""
    text = f"{seed}/{epoch}/{step_index}/{micro_batch}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class FixedPointSum:
    """Adds scaled fp32 vectors up in int64; what lies behind the binary point is cut off.

    The work is bound by memory, not by arithmetic: a vector is taken in blocks that stay in the cache between being
    converted and being added, and nothing of its length is allocated.

    Args:
        total: (num_values,) int64, where the sum is kept; zeroed here.
        norm_limit: vectors whose 2-norm is not below this are counted in `num_bad` and not added.
    """

    def __init__(self, total: Tensor, *, norm_limit: float) -> None:
        self.total = total.zero_()
        self.num_bad = 0
        self._norm_limit = norm_limit
        block_values = min(len(total), _BLOCK_VALUES) if total.device.type == "cpu" else len(total)
        self._integers = torch.empty(block_values, dtype=torch.int64, device=total.device)

    def clear(self) -> None:
        """Begin a new sum."""
        self.total.zero_()
        self.num_bad = 0

    def add(self, pieces: Sequence[Tensor]) -> None:
        """Add the vector that the flattened `pieces` form, if it is finite and within the limit."""
        vectors = [piece.reshape(-1) for piece in pieces]
        # A square that overflows fp32 is an infinity, and fails; so does a NaN.
        if not math.sqrt(sum(torch.dot(vector, vector).item() for vector in vectors)) < self._norm_limit:
            self.num_bad += 1
            return
        block_values = len(self._integers)
        for vector, total in zip(vectors, self.total.split([len(vector) for vector in vectors]), strict=True):
            for values, sums in zip(vector.split(block_values), total.split(block_values), strict=True):
                integers = self._integers[: len(values)]
                integers.copy_(values)
                sums.add_(integers)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is learned: the network, its data and the numbers that fix each micro-batch's bits."""

    model: ConvNet
    images: Tensor  # (num_samples, 28, 28) uint8
    labels: Tensor  # (num_samples,) int64
    seed: int
    device: torch.device
    precision: str  # "fp32" or "bf16"

    def loss(self, micro_batch: MicroBatch, *, epoch: int, step_index: int) -> Tensor:
        """Return the sum of the micro-batch's losses, a scalar with its graph."""
        generator = torch.Generator(self.device)
        generator.manual_seed(micro_batch_seed(self.seed, epoch, step_index, micro_batch.index))
        inputs, labels = self.gather(micro_batch.samples)
        with autocast(self.device, self.precision):
            outputs = self.model(inputs, generator)
        return nll_loss(outputs.float(), labels, reduction="sum")

    def gather(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalised images (n, 1, 28, 28) fp32 and labels (n,) on the device."""
        return normalise(self.images[samples].to(self.device)), self.labels[samples].to(self.device)


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Return the context of a forward pass.

    The cast weights are not cached: torch keeps that cache for all threads together, and a lane must not
    use another lane's graph.
    """
    if precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)
    return nullcontext()


class ExactGradient:
    """The fixed-point sum of all micro-batches' gradients, over lanes and ranks.

    Args:
        problem: what is learned.
        lanes: computes this rank's micro-batches.
        all_reduce: adds up over ranks.
        global_batch_size: of a full step.
        micro_batch_size: at most, in samples.
    """

    def __init__(
        self, problem: Problem, lanes: Lanes, all_reduce: AllReduce, *, global_batch_size: int, micro_batch_size: int
    ) -> None:
        self._problem = problem
        self._lanes = lanes
        self._all_reduce = all_reduce
        self._parameters = list(problem.model.parameters())
        num_values = sum(parameter.numel() for parameter in self._parameters)
        num_micro_batches = -(-global_batch_size // micro_batch_size)
        self._exponent = choose_exponent(micro_batch_size, num_micro_batches)
        # What is sent: the sum of the gradients, and behind it the integers that travel along.
        self._message = torch.zeros(num_values + _NUM_EXTRAS, dtype=torch.int64, device=problem.device)
        self._values, self._extras = self._message[:num_values], self._message[num_values:]
        self._sums = [
            FixedPointSum(
                # The first lane adds where the message is read.
                self._values if lane == 0 else torch.empty_like(self._values),
                norm_limit=micro_batch_size * 2.0 ** (MEAN_NORM_LIMIT_BITS + self._exponent),
            )
            for lane in range(lanes.num_lanes)
        ]
        # The backward pass begins with the scale, and each of its products is scaled by a power of two: the
        # gradients come out in fixed-point units, with the bits that they would have had.
        self._scale = torch.tensor(2.0**self._exponent, device=problem.device)
        self._losses = [0] * lanes.num_lanes
        self._wide = torch.empty(num_values, dtype=torch.float64, device=problem.device)
        self._gradient = torch.zeros(num_values, dtype=torch.float32, device=problem.device)
        self._share_gradient()

    def _share_gradient(self) -> None:
        """Make every parameter's `.grad` a view into the one flat gradient."""
        sizes = [parameter.numel() for parameter in self._parameters]
        for parameter, piece in zip(self._parameters, self._gradient.split(sizes), strict=True):
            parameter.grad = piece.view_as(parameter)

    def __call__(self, step: Step, *, step_index: int, stop: bool = False) -> StepResult:
        """Compute, add up and agree; see `GradientSync`."""
        for lane, total in enumerate(self._sums):
            total.clear()
            self._losses[lane] = 0

        def compute(lane: int, micro_batch: MicroBatch) -> None:
            loss = self._problem.loss(micro_batch, epoch=step.epoch, step_index=step_index)
            self._sums[lane].add(torch.autograd.grad(loss, self._parameters, self._scale))
            value = loss.item()
            self._losses[lane] += round(value * 2**_LOSS_EXPONENT) if math.isfinite(value) else 0

        self._lanes.run(compute, step.micro_batches)
        for other in self._sums[1:]:
            self._values.add_(other.total)
        num_bad = sum(total.num_bad for total in self._sums)
        self._extras.copy_(torch.tensor([sum(self._losses), num_bad, int(stop)]))
        self._all_reduce(self._message)
        # int64 to fp64 rounds at 2^53, the division once more, the copy to fp32 last: three fixed functions
        # of one integer, the same on every rank.
        self._wide.copy_(self._values)
        self._gradient.copy_(self._wide.mul_(2.0**-self._exponent / step.num_samples))
        loss_sum, num_bad, num_stops = self._extras.tolist()
        return StepResult(loss_sum=loss_sum / 2**_LOSS_EXPONENT, num_bad=num_bad, num_stops=num_stops)


class AllReduceGradient:
    """DDP's own floating-point sum, overlapped with the backward pass: the field's usual way, for comparison.

    Its bits depend on the world size. `wrapped` is the problem's model in DistributedDataParallel.
    """

    def __init__(self, problem: Problem, wrapped: nn.parallel.DistributedDataParallel, all_reduce: AllReduce) -> None:
        self._problem = problem
        self._wrapped = wrapped
        self._all_reduce = all_reduce

    def __call__(self, step: Step, *, step_index: int, stop: bool = False) -> StepResult:
        """Compute and agree; see `GradientSync`."""
        world_size = torch.distributed.get_world_size()
        # A rank without work still takes part in DDP's collectives: it computes a batch of nothing.
        nothing = MicroBatch(index=-1, samples=torch.empty(0, dtype=torch.int64))
        self._wrapped.zero_grad()
        loss_sum = 0.0
        for micro_batch, is_last in _with_last(step.micro_batches or (nothing,)):
            with nullcontext() if is_last else self._wrapped.no_sync():
                problem = Problem(**{**vars(self._problem), "model": self._wrapped})
                loss = problem.loss(micro_batch, epoch=step.epoch, step_index=step_index)
                # DDP divides by the world size; the gradient wanted is that of the mean over the step.
                (loss * (world_size / step.num_samples)).backward()
            loss_sum += loss.item()
        gradients = [parameter.grad for parameter in self._problem.model.parameters()]
        finite = all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients)
        extras = torch.tensor(
            [loss_sum if math.isfinite(loss_sum) else 0.0, float(not finite), float(stop)],
            dtype=torch.float64,
            device=self._problem.device,
        )
        self._all_reduce(extras)
        loss_total, num_bad, num_stops = extras.tolist()
        return StepResult(loss_sum=loss_total, num_bad=round(num_bad), num_stops=round(num_stops))


def _with_last(items: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, bool]]:
    for index, item in enumerate(items):
        yield item, index == len(items) - 1


def use_deterministic_kernels(device: torch.device) -> None:
    """Have torch choose kernels that give the same bits each time. Call it before the device is first used."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(mode=True)
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False

"""The mean gradient of a step, the same bits however its micro-batches are divided over threads and ranks.

A micro-batch is the unit: its shape, its random numbers and its kernels do not depend on who computes it or beside
what. Its gradient goes into a fixed-point sum (`fixed_point`), and one integer all-reduce adds up over the ranks.
"""

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import nll_loss

from elastic_mnist.training.fixed_point import (
    FixedPointSum,
    choose_exponent,
    loss_from_fixed,
    loss_to_fixed,
    to_float,
    value_limit,
)
from elastic_mnist.training.model import normalise
from elastic_mnist.training.pool import MicroBatchPool
from elastic_mnist.training.sampler import MicroBatch, Step

_NUM_EXTRAS: Final = 3  # integers that travel behind the gradient: loss, bad micro-batches, ranks that are to stop

_ADDED_AT_ONCE: Final = 4
"""Gradients that a thread keeps, 4.8 MB each, to add them in one pass."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What all ranks know after a step's gradient; the same at each of them.

    Attributes:
        loss_sum: of the step's samples, over all ranks, less those of bad micro-batches.
        num_bad: micro-batches whose loss or gradient was not finite, or beyond the limit of the fixed point.
        num_stopping: ranks that had been asked to stop when they sent their gradient.
    """

    loss_sum: float
    num_bad: int
    num_stopping: int = 0


class GradientSync(Protocol):
    """Fills the parameters' `.grad` with the mean gradient of a step."""

    def __call__(self, step: Step, *, step_index: int) -> StepResult:
        """Compute and agree. Every rank must call this, also with no micro-batch of its own.

        Args:
            step: the step, with this rank's micro-batches.
            step_index: number of steps finished before it; seeds its randomness.
        """
        ...


class AllReduce(Protocol):
    """Adds a tensor up over all ranks, in place."""

    def __call__(self, tensor: Tensor) -> None:
        """Every rank must call this."""
        ...


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What is learned: the network, its data and the numbers that fix each micro-batch's bits."""

    model: nn.Module  # the ConvNet, or DDP around it
    images: Tensor  # (num_samples, 28, 28) uint8
    labels: Tensor  # (num_samples,) int64
    seed: int
    device: torch.device
    precision: str  # "fp32" or "bf16"
    on_progress: Callable[[], None] = lambda: None  # called by any thread for each micro-batch

    def loss(self, micro_batch: MicroBatch, *, epoch: int, step_index: int) -> Tensor:
        """Return the sum of the micro-batch's losses, a scalar with its graph."""
        self.on_progress()
        generator = torch.Generator(self.device)
        generator.manual_seed(micro_batch_seed(self.seed, epoch, step_index, micro_batch.index))
        inputs = normalise(self.images[micro_batch.samples].to(self.device))
        labels = self.labels[micro_batch.samples].to(self.device)
        with autocast(self.device, self.precision):
            outputs: Tensor = self.model(inputs, generator)
        return nll_loss(outputs.float(), labels, reduction="sum")


def micro_batch_seed(seed: int, epoch: int, step_index: int, micro_batch: int) -> int:
    """Return the 63-bit seed of a micro-batch's randomness: its coordinates, and nothing else."""
    text = f"{seed}/{epoch}/{step_index}/{micro_batch}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Return the context of a forward pass.

    The cast weights are not cached: torch keeps that cache for all threads together, and a thread must not use another
    thread's graph.
    """
    if precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)
    return nullcontext()


class ExactGradient:
    """The fixed-point sum of all micro-batches' gradients, over threads and ranks.

    Args:
        problem: what is learned; the `.grad` of its model is filled.
        pool: computes this rank's micro-batches.
        all_reduce: adds up over ranks.
        global_batch_size: of a full step.
        micro_batch_size: at most, in samples.
        is_stopping: whether this process has been asked to stop.
    """

    def __init__(
        self,
        objective: Objective,
        pool: MicroBatchPool,
        all_reduce: AllReduce,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._objective = objective
        self._pool = pool
        self._is_stopping = is_stopping
        self._all_reduce = all_reduce
        self._parameters = list(objective.model.parameters())
        sizes = [parameter.numel() for parameter in self._parameters]
        self._exponent = choose_exponent(micro_batch_size, -(-global_batch_size // micro_batch_size))
        # What is sent: the sum of the gradients, and behind it the integers that travel along.
        self._message = torch.zeros(sum(sizes) + _NUM_EXTRAS, dtype=torch.int64, device=objective.device)
        self._values, self._extras = self._message[: sum(sizes)], self._message[sum(sizes) :]
        self._sum = FixedPointSum(self._values, sizes, limit=value_limit(micro_batch_size, self._exponent))
        # The backward pass begins with the scale, and each of its products is scaled by a power of two: the
        # gradients come out in fixed-point units, with the bits that they would have had.
        self._scale = torch.tensor(2.0**self._exponent, device=objective.device)
        self._gradient = torch.zeros(sum(sizes), dtype=torch.float32, device=objective.device)
        for parameter, piece in zip(self._parameters, self._gradient.split(sizes), strict=True):
            parameter.grad = piece.view_as(parameter)  # every `.grad` is a view into the one flat gradient

    def __call__(self, step: Step, *, step_index: int) -> StepResult:
        """Compute, add up and agree; see `GradientSync`."""
        self._sum.clear()
        losses: list[int] = []  # of the micro-batches that are fit to be used
        waiting: list[list[tuple[int, tuple[Tensor, ...]]]] = [[] for _ in range(self._pool.num_threads)]

        def compute(thread: int, micro_batch: MicroBatch) -> None:
            loss = self._objective.loss(micro_batch, epoch=step.epoch, step_index=step_index)
            fixed = loss_to_fixed(loss.item())
            if fixed is not None:
                waiting[thread].append((fixed, torch.autograd.grad(loss, self._parameters, self._scale)))
            if len(waiting[thread]) == _ADDED_AT_ONCE:
                add(thread)

        def add(thread: int) -> None:
            are_fit = self._sum.add_all([gradient for _, gradient in waiting[thread]])
            losses.extend(fixed for (fixed, _), is_fit in zip(waiting[thread], are_fit, strict=True) if is_fit)
            waiting[thread].clear()

        self._pool.run(compute, step.micro_batches, finish=add)
        values = self._sum.total  # zeros, where nothing was added
        assert values is self._values  # which is part of the message
        num_bad = len(step.micro_batches) - len(losses)
        self._extras.copy_(torch.tensor([sum(losses), num_bad, int(self._is_stopping())]))
        self._all_reduce(self._message)
        factor, num_parts = 2.0**-self._exponent / step.num_samples, self._pool.num_threads
        self._pool.run(
            lambda _thread, part: to_float(part[0], factor, part[1]),
            zip(values.chunk(num_parts), self._gradient.chunk(num_parts), strict=True),
        )
        loss_sum, num_bad, num_stopping = self._extras.tolist()
        return StepResult(loss_sum=loss_from_fixed(loss_sum), num_bad=num_bad, num_stopping=num_stopping)

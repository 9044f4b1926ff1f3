"""Sums that have no order: fp32 vectors, added up as fixed-point int64.

Floating-point addition is not associative: the sum of the micro-batches' gradients depends on the order of the
additions, and that order on who computed what. Integer addition has no order. So each micro-batch's fp32 gradient
is turned into fixed-point int64 and added there. Threads may then add to one sum as they come, and ranks by gloo or by
NCCL: it is always the same sum, down to the last bit.

The scale, a power of two
    A micro-batch of at most b samples adds the gradient of the *sum* of its losses. With M micro-batches in a step
    and 2^62 as the room of an int64 (one bit is the sign, one a margin), a value may reach 2^62 / M without any sum
    of M of them overflowing. We admit 2^10 for each value of a micro-batch's mean gradient, hence |value| < 2^10 b,
    and scale by the largest power of two that fits:

        2^10 * b * M * 2^exponent <= 2^62

    The bound is checked, not hoped for: least and greatest value of every micro-batch's gradient must lie within
    2^10 b, which infinities do not, and NaN fails each comparison. So overflow cannot happen, and what is not finite
    is found.

The error
    Scaling by a power of two is exact. Conversion to int64 truncates: less than one unit, 2^-exponent, for each
    micro-batch, so the step's mean gradient over n samples is off by less than

        M * 2^-exponent / n

    from the exact sum of the micro-batches' fp32 gradients; at the defaults (b = 64, M = 8, n = 512) the exponent is
    43, the bound 1.8e-15. A fp32 sum rounds by 2^-24 of its value: fixed point is finer for every element above
    3e-8. The conversion back to fp32 rounds once.
"""

import math
import threading
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MEAN_LIMIT_BITS: Final = 10
LOSS_EXPONENT: Final = 24  # of the losses' own fixed point: 6e-8 of a nat for each micro-batch

_BLOCK: Final = 2**15  # values: with their integers and their sums 0.7 MB, a third of a core's second cache
_ROOM_BITS: Final = 62
_LOSS_LIMIT: Final = 2.0**22  # 2^16 micro-batches at this limit still fit, one for each sample of MNIST

_Floats: TypeAlias = npt.NDArray[np.float32]
_Integers: TypeAlias = npt.NDArray[np.int64]


def choose_exponent(micro_batch_size: int, num_micro_batches: int) -> int:
    """Return the exponent of the scale; see the module's docstring."""
    return math.floor(_ROOM_BITS - MEAN_LIMIT_BITS - math.log2(micro_batch_size * num_micro_batches))


def value_limit(micro_batch_size: int, exponent: int) -> float:
    """Return what the magnitudes of a micro-batch's scaled gradient must lie below."""
    return micro_batch_size * 2.0 ** (MEAN_LIMIT_BITS + exponent)


def error_bound(micro_batch_size: int, num_micro_batches: int, num_samples: int) -> float:
    """Return the largest error of an element of the mean gradient before it is rounded to fp32."""
    return num_micro_batches * 2.0 ** -choose_exponent(micro_batch_size, num_micro_batches) / num_samples


def loss_to_fixed(loss: float) -> int | None:
    """Return a sum of losses as an integer; None where it is not finite, or too large for sums of it to fit."""
    return round(loss * 2**LOSS_EXPONENT) if abs(loss) < _LOSS_LIMIT else None


def loss_from_fixed(total: int) -> float:
    """Return what a sum of such integers stands for."""
    return total / 2**LOSS_EXPONENT


class FixedPointSum:
    """Adds scaled fp32 vectors up in int64; what lies behind the binary point is cut off.

    Threads may add at the same time; in which order they come changes no bit.

    Args:
        total: (num_values,) int64, where the sum is kept.
        sizes: of the pieces that a vector comes in; they add up to num_values.
        limit: vectors with a value whose magnitude is not below this are not added.
    """

    def __init__(self, total: Tensor, sizes: Sequence[int], *, limit: float) -> None:
        self._total = total
        self._limit = limit
        self._lock = threading.Lock()
        self._is_on_cpu = total.device.type == "cpu"
        longest = _BLOCK if self._is_on_cpu else max(sizes)
        self._blocks = [
            _Block(index, slice(start, start + longest), piece[start : start + longest])
            for index, piece in enumerate(total.split(list(sizes)))
            for start in range(0, len(piece), longest)
        ]

    def clear(self) -> None:
        """Begin a new sum."""
        for block in self._blocks:
            block.is_empty = True

    @property
    def total(self) -> Tensor:
        """The sum. Read it when nobody is adding."""
        for block in self._blocks:
            if block.is_empty:
                block.total.zero_()
                block.is_empty = False
        return self._total

    def add_all(self, vectors: Sequence[Sequence[Tensor]]) -> list[bool]:
        """Add those of the vectors that are within the limit in all their values; return which are.

        One that is not leaves the sum as it was. Several at once cost less than one after the other: the sum is far
        larger than a core's cache, and reading and writing it is half of an addition's time.
        """
        flat = [[piece.reshape(-1) for piece in vector] for vector in vectors]
        return self._add_on_cpu(flat) if self._is_on_cpu else self._add_on_accelerator(flat)

    def _add_on_cpu(self, vectors: Sequence[Sequence[Tensor]]) -> list[bool]:
        """Pass over the memory once, which is what bounds the work, in blocks that a cache holds.

        numpy, because torch takes twice as long to add integers.
        """
        floats: list[list[_Floats]] = [[piece.numpy() for piece in vector] for vector in vectors]
        are_fit = [True] * len(floats)
        integers = np.empty(_BLOCK, dtype=np.int64)
        for number, block in enumerate(self._blocks):
            for index, vector in enumerate(floats):
                if are_fit[index] and not self._is_within(block.of(vector)):
                    are_fit[index] = False
                    for before in self._blocks[:number]:  # integers: what is taken away again leaves no trace
                        before.subtract(before.of(vector), integers)
            block.add([block.of(vector) for vector, is_fit in zip(floats, are_fit, strict=True) if is_fit], integers)
        return are_fit

    def _is_within(self, values: _Floats) -> bool:
        return bool(-self._limit < np.minimum.reduce(values) and np.maximum.reduce(values) < self._limit)

    def _add_on_accelerator(self, vectors: Sequence[Sequence[Tensor]]) -> list[bool]:
        are_fit = []
        with self._lock:
            for vector in vectors:
                greatest = torch.stack([piece.abs().amax() for piece in vector]).amax()
                are_fit.append(greatest.item() < self._limit)
                if are_fit[-1]:
                    for block, piece in zip(self._blocks, vector, strict=True):
                        if block.is_empty:
                            block.total.copy_(piece)
                        else:
                            block.total.add_(piece.to(torch.int64))
                        block.is_empty = False
        return are_fit


class _Block:
    """A part of the sum.

    Attributes:
        total: (at most _BLOCK values,) int64; on an accelerator, a whole piece.
        is_empty: what stands in `total` is of no sum yet: the first vector is written, not added.
    """

    def __init__(self, piece: int, part: slice, total: Tensor) -> None:
        self._piece, self._part = piece, part
        self._lock = threading.Lock()  # one a block: who comes second follows the first through the sum
        self.total = total
        self.is_empty = True

    def of(self, vector: Sequence[_Floats]) -> _Floats:
        """Return the part of a vector that belongs here."""
        return vector[self._piece][self._part]

    def add(self, parts: Sequence[_Floats], integers: _Integers) -> None:
        """Add the vectors' parts; `integers` is room for one."""
        total = self.total.numpy()
        with self._lock:
            for part in parts:
                if self.is_empty:
                    np.copyto(total, part, casting="unsafe")
                    self.is_empty = False
                else:
                    np.add(total, _to_integers(part, integers), out=total)

    def subtract(self, part: _Floats, integers: _Integers) -> None:
        """Take a part away that was added."""
        total = self.total.numpy()
        with self._lock:
            np.subtract(total, _to_integers(part, integers), out=total)


def _to_integers(values: _Floats, integers: _Integers) -> _Integers:
    converted = integers[: len(values)]
    np.copyto(converted, values, casting="unsafe")
    return converted


def to_float(total: Tensor, factor: float, out: Tensor) -> None:
    """Write `total * factor` to `out`.

    int64 to fp64 rounds at 2^53, the product once more, fp32 last: three fixed functions of one integer, the same
    bits on every rank.

    Args:
        total: (num_values,) int64.
        factor: of the scale and of the mean.
        out: (num_values,) fp32.
    """
    if total.device.type != "cpu":
        out.copy_(total.double().mul_(factor))
        return
    np.multiply(total.numpy(), factor, out=out.numpy(), dtype=np.float64, casting="unsafe")  # no copy in between

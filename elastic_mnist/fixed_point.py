"""Sums that have no order: fp32 vectors, added up as fixed-point int64.

Floating-point addition is not associative: the sum of the micro-batches' gradients depends on the order of the
additions, and that order on who computed what. Integer addition has no order. So each micro-batch's fp32 gradient
is turned into fixed-point int64 and added there. Lanes may then add to one sum as they come, and ranks by gloo or by
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
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MEAN_LIMIT_BITS: Final = 10
LOSS_EXPONENT: Final = 24  # of the losses' own fixed point: 6e-8 of a nat for each micro-batch

_BLOCK: Final = 2**16  # values: with their integers and their sums 1.3 MB, less than a core's second cache
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
        limit: vectors with a value whose magnitude is not below this are not added.
    """

    def __init__(self, total: Tensor, *, limit: float) -> None:
        self._total = total
        self._limit = limit
        self._lock = threading.Lock()
        self._integers = np.empty(_BLOCK, dtype=np.int64)
        self.clear()

    def clear(self) -> None:
        """Begin a new sum."""
        self._is_empty = True  # the first vector is written, not added: no need for zeros

    @property
    def total(self) -> Tensor:
        """The sum. Read it when nobody is adding."""
        if self._is_empty:
            self._total.zero_()
            self._is_empty = False
        return self._total

    def add(self, pieces: Sequence[Tensor]) -> bool:
        """Add the vector that the flattened `pieces` form, if all of it is within the limit; return whether it is.

        A vector that is not leaves the sum as it was.
        """
        vectors = [piece.reshape(-1) for piece in pieces]
        totals = self._total.split([len(vector) for vector in vectors])
        with self._lock:
            add = self._add_on_cpu if self._total.device.type == "cpu" else self._add_on_accelerator
            is_fit = add(vectors, totals)
            self._is_empty = self._is_empty and not is_fit
        return is_fit

    def _add_on_cpu(self, vectors: Sequence[Tensor], totals: Sequence[Tensor]) -> bool:
        """Pass over the memory once, which is what bounds the work, in blocks that a cache holds.

        numpy, because torch takes twice as long to add integers.
        """
        added: list[tuple[_Floats, _Integers]] = []
        for block, total in _blocks(vectors, totals):
            if not (-self._limit < np.minimum.reduce(block) and np.maximum.reduce(block) < self._limit):
                for before, total_before in added:  # integers: what is taken away again leaves no trace
                    np.subtract(total_before, self._to_integers(before), out=total_before)
                return False
            if self._is_empty:
                np.copyto(total, block, casting="unsafe")
            else:
                np.add(total, self._to_integers(block), out=total)
            added.append((block, total))
        return True

    def _to_integers(self, block: _Floats) -> _Integers:
        integers = self._integers[: len(block)]
        np.copyto(integers, block, casting="unsafe")
        return integers

    def _add_on_accelerator(self, vectors: Sequence[Tensor], totals: Sequence[Tensor]) -> bool:
        greatest = torch.stack([vector.abs().amax() for vector in vectors]).amax()
        if not greatest.item() < self._limit:
            return False
        for vector, total in zip(vectors, totals, strict=True):
            if self._is_empty:
                total.copy_(vector)
            else:
                total.add_(vector.to(torch.int64))
        return True


def _blocks(vectors: Sequence[Tensor], totals: Sequence[Tensor]) -> Iterator[tuple[_Floats, _Integers]]:
    for vector, total in zip(vectors, totals, strict=True):
        floats, integers = vector.numpy(), total.numpy()
        for start in range(0, len(floats), _BLOCK):
            yield floats[start : start + _BLOCK], integers[start : start + _BLOCK]


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

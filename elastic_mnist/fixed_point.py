"""Sums that have no order: fp32 vectors, added up as fixed-point int64.

Floating-point addition is not associative: the sum of the micro-batches' gradients depends on the order of the
additions, and that order on who computed what. Integer addition has no order. So each micro-batch's fp32 gradient
is turned into fixed-point int64 and added there; sums within a lane, over lanes, over ranks, by gloo or by NCCL, are
then all the same sum, down to the last bit.

The scale, a power of two
    A micro-batch of at most b samples adds the gradient of the *sum* of its losses. With M micro-batches in a step
    and 2^62 as the room of an int64 (one bit is the sign, one a margin), a value may reach 2^62 / M without any sum
    of M of them overflowing. We admit a norm of 2^10 for the mean gradient of a micro-batch, hence |value| < 2^10 b,
    and scale by the largest power of two that fits:

        2^10 * b * M * 2^exponent <= 2^62

    The bound is checked, not hoped for: the 2-norm of every micro-batch's gradient, a dot product over its pieces,
    must lie below 2^10 b. The norm bounds each element, and NaN and infinity fail the comparison too. (The norm is
    itself a rounded fp32 number, for a million elements by 7 % at the very worst; the margin bit pays for that.) So
    overflow cannot happen, and what is not finite is found before it is added.

The error
    Scaling by a power of two is exact. Conversion to int64 truncates: less than one unit, 2^-exponent, for each
    micro-batch, so the step's mean gradient over n samples is off by less than

        M * 2^-exponent / n

    from the exact sum of the micro-batches' fp32 gradients; at the defaults (b = 64, M = 8, n = 512) the exponent is
    43, the bound 1.8e-15. A fp32 sum rounds by 2^-24 of its value: fixed point is finer for every element above
    3e-8. The conversion back to fp32 rounds once.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

MEAN_NORM_LIMIT_BITS: Final = 10
LOSS_EXPONENT: Final = 24  # of the losses' own fixed point: 6e-8 of a nat for each micro-batch

_ROOM_BITS: Final = 62
_LOSS_LIMIT: Final = 2.0**22  # 2^16 micro-batches at this limit still fit, one for each sample of MNIST


def choose_exponent(micro_batch_size: int, num_micro_batches: int) -> int:
    """Return the exponent of the scale; see the module's docstring."""
    return math.floor(_ROOM_BITS - MEAN_NORM_LIMIT_BITS - math.log2(micro_batch_size * num_micro_batches))


def norm_limit(micro_batch_size: int, exponent: int) -> float:
    """Return what the 2-norm of a micro-batch's scaled gradient must lie below."""
    return micro_batch_size * 2.0 ** (MEAN_NORM_LIMIT_BITS + exponent)


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

    The work is bound by memory, not by arithmetic, so each vector is passed over as few times as can be.

    Args:
        total: (num_values,) int64, where the sum is kept.
        norm_limit: vectors whose 2-norm is not below this are counted in `num_bad` and not added.
    """

    def __init__(self, total: Tensor, *, norm_limit: float) -> None:
        self._total = total
        self._norm_limit = norm_limit
        self.clear()

    def clear(self) -> None:
        """Begin a new sum."""
        self.num_bad = 0
        self._is_empty = True  # the first vector is written, not added: no need for zeros

    @property
    def total(self) -> Tensor:
        """The sum."""
        if self._is_empty:
            self._total.zero_()
            self._is_empty = False
        return self._total

    def add(self, pieces: Sequence[Tensor]) -> None:
        """Add the vector that the flattened `pieces` form, if it is finite and within the limit."""
        vectors = [piece.reshape(-1) for piece in pieces]
        # A square that overflows fp32 is an infinity, and fails; so does a NaN.
        if not math.sqrt(sum(torch.dot(vector, vector).item() for vector in vectors)) < self._norm_limit:
            self.num_bad += 1
            return
        for vector, total in zip(vectors, self._total.split([len(vector) for vector in vectors]), strict=True):
            if self._is_empty:
                total.copy_(vector)
            else:
                _add_truncated(total, vector)
        self._is_empty = False


def _add_truncated(total: Tensor, vector: Tensor) -> None:
    """Add fp32 to int64, in place."""
    if total.device.type != "cpu":
        total.add_(vector.to(torch.int64))
        return
    # numpy converts and adds in one pass, through a buffer in the first cache; torch would write the integers out.
    np.add(total.numpy(), vector.numpy(), out=total.numpy(), dtype=np.int64, casting="unsafe")


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
    np.multiply(total.numpy(), factor, out=out.numpy(), dtype=np.float64, casting="unsafe")  # one pass, as above

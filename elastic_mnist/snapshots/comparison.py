"""Compares two snapshots bit by bit.

Compares only the state that training resumes from: weights, optimizer state and position. Two equal snapshots may
differ in who wrote them, when and where.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from elastic_mnist.snapshots.state import State

_COMPARED: Final = ("model", "optimizer", "epoch", "step", "samples_in_epoch")

_ABSENT: Final = "(absent)"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where two snapshots first differ.

    Attributes:
        key: path of the value, `model/features.0.weight` for instance.
        index: of the first element that differs; empty unless both are tensors of one shape and dtype.
        ours, theirs: the two values there.
        num_keys: number of keys that differ.
        largest: largest absolute difference of two elements of any tensor; None where no two can be subtracted.
    """

    key: str
    index: tuple[int, ...]
    ours: object
    theirs: object
    num_keys: int
    largest: float | None

    @property
    def location(self) -> str:
        """Key and index, for people."""
        return f"{self.key}{list(self.index) if self.index else ''}"


def compare(ours: State, theirs: State) -> Difference | None:
    """Return where two states differ; None where they are equal, bit for bit."""
    left, right = (dict(_leaves({key: state[key] for key in _COMPARED})) for state in (ours, theirs))
    pairs = {key: (left.get(key, _ABSENT), right.get(key, _ABSENT)) for key in dict.fromkeys([*left, *right])}
    differing = [key for key, pair in pairs.items() if not _same(*pair)]
    if not differing:
        return None
    index, first, second = _first_difference(*pairs[differing[0]])
    sizes = [_distance(*pairs[key]) for key in differing]
    known = [size for size in sizes if size is not None]
    return Difference(
        key=differing[0],
        index=index,
        ours=first,
        theirs=second,
        num_keys=len(differing),
        largest=max(known) if known else None,
    )


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        members = [(str(key), member) for key, member in value.items()]
    elif isinstance(value, (list, tuple)):
        members = [(str(index), member) for index, member in enumerate(value)]
    else:
        yield path, value
        return
    for key, member in members:
        yield from _leaves(member, f"{path}/{key}" if path else key)


def _same(ours: object, theirs: object) -> bool:
    """Whether two values have the same bits: -0.0 and 0.0 do not, two equal NaN do."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return (
            ours.dtype == theirs.dtype
            and ours.shape == theirs.shape
            and torch.equal(_bytes_of(ours), _bytes_of(theirs))
        )
    if isinstance(ours, float) and isinstance(theirs, float):
        return struct.pack("<d", ours) == struct.pack("<d", theirs)
    return type(ours) is type(theirs) and ours == theirs


def _bytes_of(tensor: Tensor) -> Tensor:
    """(num_elements, bytes an element) uint8."""
    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)


def _first_difference(ours: object, theirs: object) -> tuple[tuple[int, ...], object, object]:
    if (
        isinstance(ours, Tensor)
        and isinstance(theirs, Tensor)
        and ours.shape == theirs.shape
        and ours.dtype == theirs.dtype
    ):
        differs = (_bytes_of(ours) != _bytes_of(theirs)).any(dim=1)
        flat = int(differs.nonzero()[0])
        index = tuple(int(part) for part in torch.unravel_index(torch.tensor(flat), ours.shape))
        return index, ours.reshape(-1)[flat].item(), theirs.reshape(-1)[flat].item()
    return (), _brief(ours), _brief(theirs)


def _distance(ours: object, theirs: object) -> float | None:
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor) and ours.shape == theirs.shape:
        return float((ours.double() - theirs.double()).abs().max()) if ours.numel() else None
    return None


def _brief(value: object) -> object:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else value

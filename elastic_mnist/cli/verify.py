"""`elastic-mnist verify SNAPSHOT [OTHER]`: is it whole, and are two the same, bit for bit?

Compared is what training goes on from: weights, optimizer state and position. Who wrote a snapshot, when and
where, may differ between two that are the same.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from elastic_mnist.errors import SnapshotError
from elastic_mnist.snapshots.lookup import find
from elastic_mnist.snapshots.state import State
from elastic_mnist.training.model import weights_sha256

_COMPARED: Final = ("model", "optimizer", "epoch", "step", "samples_in_epoch")

_ABSENT: Final = "(absent)"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where two snapshots first differ.

    Attributes:
        key: path of the value, `model/features.0.weight` for instance.
        index: of the first element that differs; empty for what is no tensor or has another shape.
        ours, theirs: the two values there.
        num_keys: how many keys differ in all.
        largest: the largest absolute difference of two elements of any tensor; None where none can be told.
    """

    key: str
    index: tuple[int, ...]
    ours: object
    theirs: object
    num_keys: int
    largest: float | None


def run(snapshot: str, other: str | None) -> int:
    """Print what is found; return 0 for whole and equal, 1 for damaged or different."""
    states, status = [], 0
    for location in (snapshot, other):
        if location is None:
            continue
        try:
            found = find(location, named="snapshot")
        except SnapshotError as error:
            print(f"damaged   {error}")  # noqa: T201 - printing is what a tool does
            return 1
        state = found.state
        states.append(state)
        print(f"whole     {found.path}")  # noqa: T201
        if found.num_damaged_newer:
            print(f"damaged   {found.num_damaged_newer} newer ones there")  # noqa: T201
            status = 1
        print(f"          step {state['step']}, epoch {state['epoch']}, run {state['run_id']}")  # noqa: T201
        print(f"          weights_sha256 {weights_sha256(state['model'])}")  # noqa: T201
    if other is None:
        return status
    difference = compare(*states)
    if difference is None:
        print("equal     weights, optimizer and position, bit for bit")  # noqa: T201
        return status
    where = f"{difference.key}{list(difference.index) if difference.index else ''}"
    print(f"different {difference.num_keys} keys; first {where}: {difference.ours} and {difference.theirs}")  # noqa: T201
    if difference.largest is not None:
        print(f"          largest difference {difference.largest:.6g}")  # noqa: T201
    return 1


def compare(ours: State, theirs: State) -> Difference | None:
    """Return where two states differ, None where they are the same, bit for bit."""
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
    """Whether two values are the same bits; -0.0 and 0.0 are not, two NaN of the same bits are."""
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

"""Files that other programs wrote, read as a beginning for this one: what `--resume_from` accepts beside our own.

Read are a plain `state_dict` of the ConvNet and the checkpoints of the usual DDP scripts, from old torch versions and
from CUDA as well. Invariant: what `read` returns fits the network, in fp32 on the CPU, and is finite; what a file lacks
is named and never guessed. A file that does not fit is a `SnapshotError` that names the key, its shape and ours.
Nothing of a file is ever run.

The formats, from their sources: pytorch/examples, `distributed/ddp-tutorial-series/multigpu_torchrun.py` and
`distributed/minGPT-ddp/mingpt/trainer.py`; pytorch.org, "Saving and loading a general checkpoint".
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from elastic_mnist.errors import SnapshotError
from elastic_mnist.snapshots.state import read_plain
from elastic_mnist.training.model import ConvNet

_WRAPPERS: Final = ("module.", "_orig_mod.")
"""What DDP and torch.compile put before each key."""

_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
_MAX_EPOCHS: Final = 10**6
_MAX_SHOWN: Final = 60  # characters of a foreign key
_TOO_LARGE: Final = 2**64


class _Layout(NamedTuple):
    """Where a kind of file keeps what.

    `num_more` epochs are finished beyond the number under `epochs`; None: scripts differ in what they count there.
    """

    kind: str
    model: str
    optimizer: str
    epochs: str
    num_more: int | None


_LAYOUTS: Final = (
    # The tutorial saves the index of the epoch that it has just finished, counted from 0 ...
    _Layout("snapshot of PyTorch's DDP tutorial", "MODEL_STATE", "OPTIMIZER_STATE", "EPOCHS_RUN", 1),
    # ... and minGPT-DDP adds one before the epoch begins: it saves how many are finished.
    _Layout("snapshot of minGPT-DDP", "model_state", "optimizer_state", "finished_epoch", 0),
    _Layout("general checkpoint of PyTorch's tutorial", "model_state_dict", "optimizer_state_dict", "epoch", None),
    _Layout("checkpoint with a state_dict", "state_dict", "optimizer", "epoch", None),
    _Layout("checkpoint with a model", "model", "optimizer", "epoch", None),
)

_PLAIN: Final = _Layout("state_dict", "", "", "", None)


@dataclass(frozen=True, kw_only=True, eq=False)
class Foreign:
    """What another program's file gives.

    Attributes:
        kind: what the file is, for people.
        model: the network's `state_dict`, complete, fp32, on the CPU, in tensors of their own.
        optimizer: `{"state": ...}` of an Adam over the network's parameters, in their order; None: the file has none
            that fits. There are no `param_groups`: the hyperparameters are this run's own, as in
            `optimizer.load_state_dict({**optimizer.state_dict(), **foreign.optimizer})`.
        num_epochs: number of epochs finished; None: the file does not say.
        lacking: what the file lacks or says in another way, and what that means, a text each.
    """

    kind: str
    model: dict[str, Tensor]
    optimizer: dict[str, Any] | None
    num_epochs: int | None
    lacking: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class ForeignFile:
    """Another program's file: where it is, its size, and what it gives."""

    path: str
    size_bytes: int
    foreign: Foreign


def read(data: bytes) -> Foreign:
    """Read another program's file from its bytes.

    Raises:
        SnapshotError: it is damaged, would run something, or does not fit the network.
        StoreError: this process cannot read it.
    """
    return of(read_plain(data))


def of(content: object) -> Foreign:
    """Understand what a file held; raises `SnapshotError` where it is nothing that fits the network."""
    layout = _layout_of(content)
    assert isinstance(content, Mapping)
    lacking: list[str] = []
    model = weights(content[layout.model] if layout.model else content, lacking)
    optimizer = _optimizer(content.get(layout.optimizer), lacking)
    num_epochs = _num_epochs(content, layout, lacking)
    lacking.append("the settings it was made under: this run's own apply")
    return Foreign(kind=layout.kind, model=model, optimizer=optimizer, num_epochs=num_epochs, lacking=tuple(lacking))


def weights(state_dict: object, notes: list[str]) -> dict[str, Tensor]:
    """Return a `state_dict` as this network has it: its keys in order, fp32, on the CPU, in memory of their own.

    Args:
        state_dict: what a file held; DDP's and torch.compile's prefixes are taken off.
        notes: gets a text where something was converted.

    Raises:
        SnapshotError: a key is missing or not ours, a shape is another, a value is not finite.
    """
    found = _without_wrappers(_texts_only(state_dict))
    shapes = _shapes()
    missing = [key for key in shapes if key not in found]
    unexpected = [key for key in found if key not in shapes]
    if missing or unexpected:
        texts = [f"{what} {_listed(keys)}" for what, keys in (("lacks", missing), ("has", unexpected)) if keys]
        raise SnapshotError(f"not this network's weights: it {' and '.join(texts)}; this network's keys are {_ours()}")
    converted = {str(tensor.dtype) for tensor in found.values() if isinstance(tensor, Tensor)} - {"torch.float32"}
    fitting = {key: _as_fp32(f"weight {key}", found[key], shape) for key, shape in shapes.items()}
    if converted:
        notes.append(f"weights in fp32: those of {', '.join(sorted(converted))} were converted")
    return fitting


def _layout_of(content: object) -> _Layout:
    if not isinstance(content, Mapping):
        raise SnapshotError(f"it holds a {type(content).__name__}, not a state_dict; save the model's state_dict()")
    found = [layout for layout in _LAYOUTS if layout.model in content]
    if len(found) > 1:
        keys = " and ".join(layout.model for layout in found)
        raise SnapshotError(f"it has both {keys}, and either may be the weights; save the state_dict alone")
    return found[0] if found else _PLAIN


def _texts_only(state_dict: object) -> dict[str, object]:
    if not isinstance(state_dict, Mapping):
        raise SnapshotError(f"its weights are a {type(state_dict).__name__}, not a state_dict")
    strange = [key for key in state_dict if not isinstance(key, str)]
    if strange:
        raise SnapshotError(f"not this network's weights: a key is {_short(strange[0])}, not a text")
    return dict(state_dict)


def _without_wrappers(found: dict[str, object]) -> dict[str, object]:
    """Take off the prefixes that all keys have: a mixture is nobody's."""
    while found:
        prefix = next((prefix for prefix in _WRAPPERS if all(key.startswith(prefix) for key in found)), None)
        if prefix is None:
            break
        found = {key.removeprefix(prefix): value for key, value in found.items()}
    return found


def _as_fp32(name: str, value: object, shape: torch.Size) -> Tensor:
    """Return a copy in fp32; the shape comes first, because a small file can hold a huge one."""
    if not isinstance(value, Tensor):
        raise SnapshotError(f"{name} is a {type(value).__name__}, not a tensor")
    if not _is_ordinary(value):
        kind = f"{value.dtype}, {value.layout}, on {value.device}"
        raise SnapshotError(f"{name} is of {kind}; save it as floating point, dense, with its values")
    if value.shape != shape:
        raise SnapshotError(f"{name} has the shape {tuple(value.shape)}, this network's has {tuple(shape)}")
    copy = value.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if not bool(torch.isfinite(copy).all()):
        raise SnapshotError(f"{name} is not finite in fp32; take a file from before the training failed")
    return copy


def _is_ordinary(value: Tensor) -> bool:
    """Whether a tensor has floating-point values, and a shape to lay them out in."""
    is_dense = value.layout == torch.strided and not value.is_nested
    return is_dense and value.is_floating_point() and value.device.type == "cpu"


def _num_epochs(content: Mapping[Any, Any], layout: _Layout, lacking: list[str]) -> int | None:
    """Return how many epochs are finished, where the file's kind leaves no doubt."""
    value = content.get(layout.epochs)
    if value is None:
        lacking.append("the number of finished epochs: they are counted from 0")
        return None
    if layout.num_more is None:
        lacking.append(
            f"the number of finished epochs: its {layout.epochs}, {_short(value)}, is an index in some scripts and a "
            f"count in others; they are counted from 0"
        )
        return None
    if type(value) is not int or not 0 <= value <= _MAX_EPOCHS:
        raise SnapshotError(f"its {layout.epochs} is {_short(value)}, no number of epochs up to {_MAX_EPOCHS:,}")
    if layout.num_more:
        lacking.append(
            f"the number of finished epochs: {layout.epochs} {value} is the last one's index, so "
            f"{value + layout.num_more} are taken as finished"
        )
    return value + layout.num_more


def _optimizer(state: object, lacking: list[str]) -> dict[str, Any] | None:
    """Return Adam's moments for our parameters; None, and why in `lacking`, where a file has none that fit."""
    begin = "they begin at zero"
    if state is None:
        lacking.append(f"the optimizer's moments: {begin}")
        return None
    try:
        return {"state": _moments(state, lacking)}
    except SnapshotError as error:
        lacking.append(f"optimizer's moments that fit ({error}): {begin}")
        return None


def _moments(state: object, notes: list[str]) -> dict[int, dict[str, Tensor]]:
    """Return the moments by the index of our parameter.

    The file's own indices say little: a script may sort its parameters into groups. No two parameters of the network
    have the same shape, so the shape of its moments tells whose an entry is.
    """
    entries = state.get("state") if isinstance(state, Mapping) else None
    if not isinstance(entries, Mapping):
        raise SnapshotError("it is no optimizer's state_dict")
    shapes = _shapes()
    index_of = {tuple(shape): index for index, shape in enumerate(shapes.values())}
    assert len(index_of) == len(shapes), "two parameters of one shape"
    if len(entries) != len(shapes):
        raise SnapshotError(f"it has a state for {len(entries)} parameters, this network has {len(shapes)}")
    moments: dict[int, dict[str, Tensor]] = {}
    others: set[str] = set()
    for entry in entries.values():
        first = entry.get(_MOMENTS[0]) if isinstance(entry, Mapping) else None
        if not isinstance(first, Tensor) or not _is_ordinary(first) or not {"step", *_MOMENTS} <= set(entry):
            raise SnapshotError("it is not Adam's: an entry lacks step, exp_avg or exp_avg_sq")
        index = index_of.get(tuple(first.shape))
        if index is None or index in moments:
            raise SnapshotError(f"exp_avg of shape {tuple(first.shape)} is not one of each parameter's")
        moments[index] = {"step": _step(entry["step"])}
        moments[index] |= {name: _as_fp32(name, entry[name], first.shape) for name in _MOMENTS}
        if bool((moments[index]["exp_avg_sq"] < 0).any()):
            raise SnapshotError("exp_avg_sq is below 0")
        others |= {_short(name) for name in entry} - {_short(name) for name in ("step", *_MOMENTS)}
    if others:
        notes.append(f"an optimizer like ours: of its state, {_listed(sorted(others))} is not used")
    return dict(sorted(moments.items()))


def _step(value: object) -> Tensor:
    """Return Adam's count of steps, which torch has kept as a number and as a tensor."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu" else value
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < 2**53 or number % 1:
        raise SnapshotError(f"step is {_short(number)}, no count of steps")
    return torch.tensor(float(number))


@functools.cache
def _shapes() -> dict[str, torch.Size]:
    """Return the network's keys and shapes, in the order of its parameters."""
    with torch.device("meta"):
        network = ConvNet()
    assert list(network.state_dict()) == [name for name, _ in network.named_parameters()]
    return {key: tensor.shape for key, tensor in network.state_dict().items()}


def _ours() -> str:
    keys = list(_shapes())
    return f"{keys[0]} ... {keys[-1]}"


def _listed(keys: list[str]) -> str:
    more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
    return f"{keys[0] if keys[0].isprintable() and len(keys[0]) <= _MAX_SHOWN else _short(keys[0])}{more}"


def _short(value: object) -> str:
    """Return a value of a foreign file as one short line; one that is nested or large is told by its type."""
    if isinstance(value, int) and abs(value) >= _TOO_LARGE:
        return "a large int"  # of so many digits that Python may refuse to spell it
    text = repr(value) if isinstance(value, (str, int, float, type(None))) else f"a {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."

"""What a snapshot holds: tensors and plain types only, loaded with `weights_only=True`.

Invariant: what `unpack` returns has every field, of the right kind. A file that lacks one, or that is
another program's, is a `SnapshotError` that names it.
"""

import contextlib
import io
import pickletools
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final, TypedDict, cast, get_origin, get_type_hints, is_typeddict

import torch
from torch import Tensor

from elastic_mnist.errors import SnapshotError, StoreError
from elastic_mnist.snapshots.plain import is_of_type
from elastic_mnist.snapshots.run_config import RunConfig
from elastic_mnist.training.sampler import Position

FORMAT: Final = "elastic_mnist.snapshot"
VERSION: Final = 1


class State(TypedDict):
    """All that a training goes on from.

    Attributes:
        model: the network's `state_dict`.
        optimizer: the optimizer's `state_dict`; of another program's file its `state` alone.
        epoch, step, samples_in_epoch: what is finished; see `Position`.
        global_batch_size, micro_batch_size, seed: as in the contract, for readers of the file alone.
        settings: all of them, as JSON-ready values.
        contract: the settings that the result hangs on.
        dataset: `name`, `num_samples` and `sha256`.
        versions: of what decides on the bits; empty where they are not known.
        world_size, run_id, generation: who made it.
        started_at: when the run began, in seconds since the epoch of UTC.
        progress: the fields of the trainer's `Progress`.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    epoch: int
    step: int
    samples_in_epoch: int
    global_batch_size: int
    micro_batch_size: int
    seed: int
    settings: dict[str, Any]
    contract: RunConfig
    dataset: dict[str, Any]
    versions: dict[str, Any]
    world_size: int
    run_id: str
    generation: int
    started_at: float
    progress: dict[str, Any]


_PLAIN: Final = (Tensor, int, float, str, bool, type(None))


def pack(state: State) -> bytes:
    """Serialise a state; `format` and `version` are added."""
    return dump_plain({"format": FORMAT, "version": VERSION, **state})


def dump_plain(content: Mapping[str, Any]) -> bytes:
    """Serialise tensors and plain types."""
    _assert_plain(content)
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def load_plain(data: bytes) -> dict[str, Any]:
    """Read what `dump_plain` of this program made."""
    content: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    return content


def detached(state: State) -> State:
    """Return a copy of a state, on the CPU, that the training does not touch any more."""
    copy: State = map_tensors(state, lambda tensor: tensor.detach().to("cpu", copy=True))
    return copy


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:  # noqa: ANN401 - a state or a part of one
    """Return a copy of a state with each tensor replaced by what `function` returns for it, in a fixed order."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(member, function) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(member, function) for member in value)
    return value


def unpack(data: bytes) -> State:
    """Read a state from the bytes of a snapshot file, onto the CPU.

    Raises:
        SnapshotError: the bytes are not a whole snapshot of this package.
        StoreError: they may be one, but this process cannot read it.
    """
    return checked(read_plain(data))


def read_plain(data: bytes) -> object:
    """Read whatever plain data `torch.save` wrote, by whichever program, onto the CPU; nothing of it is run.

    Raises:
        SnapshotError: it is no such data.
        StoreError: this process cannot read it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's remarks on a foreign file; the error says enough
            content: object = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except (MemoryError, OSError) as error:  # this process's trouble, not the snapshot's
        raise StoreError(f"it cannot be read here: {str(error) or type(error).__name__}") from error
    except Exception as error:
        if isinstance(error, RuntimeError) and "allocate memory" in str(error):  # torch's allocator says it so
            raise StoreError("it cannot be read here: there is not enough memory") from error
        raise SnapshotError(f"not readable as plain data: {_why_unreadable(data, str(error))}") from error
    return content


def is_own(content: object) -> bool:
    """Whether what was read is a snapshot of this package, of any version, whole or not."""
    return isinstance(content, dict) and content.get("format") == FORMAT


def checked(state: object) -> State:
    """Return what was read, with every field of a snapshot in it; raises what `unpack` does."""
    if not isinstance(state, dict) or not is_own(state):
        raise SnapshotError(f"not of the format {FORMAT}")
    version = state.get("version")
    if isinstance(version, int) and version > VERSION:  # whole, and not to be set aside
        raise StoreError(f"it is of version {version}, this program reads {VERSION}; install a later one")
    if version != VERSION:
        raise SnapshotError(f"version {version}, this program reads {VERSION}")
    for name, hint in get_type_hints(State).items():
        if not is_of_type(state.get(name), hint):
            kind = dict if is_typeddict(hint) else get_origin(hint) or hint
            raise SnapshotError(f"its field {name} is missing or not a {kind.__name__}")
    for name in ("epoch", "step", "samples_in_epoch"):
        if state[name] < 0:
            raise SnapshotError(f"its field {name} is {state[name]}")
    return cast("State", state)


def _why_unreadable(data: bytes, message: str) -> str:
    """Return one line out of torch's many; its advice on how to load the file all the same is not for here."""
    wanted = re.search(r"GLOBAL (\S+)", message)
    called = [wanted[1]] if wanted else _called_by(data)
    if called:
        name = re.sub(r"^posix\.", "os.", called[0])  # pickle's spelling of it
        return f"it wants to run {name[:80]!r}; load it where you trust it, and save its state_dict() alone"
    if not data:
        return "it has 0 bytes"
    refused = re.search(r"WeightsUnpickler error:\s*(.*)", message)
    lines = (refused[1] if refused else message).strip().splitlines()
    says_something = lines and " " in lines[0] and not lines[0].startswith("Unsupported operand")
    return lines[0][:200] if says_something else "it is no file of torch.save, or only a part of one"


def _called_by(data: bytes) -> list[str]:
    """Return what a bare pickle would call, found without running it; nothing where the bytes are no pickle."""
    called: list[str] = []
    texts: list[str] = []
    with contextlib.suppress(Exception):  # whatever is found before the bytes make no sense will do
        for opcode, argument, _ in pickletools.genops(data if data.startswith(b"\x80") else b"."):
            if opcode.name in ("GLOBAL", "INST"):
                called.append(str(argument).replace(" ", "."))
            elif opcode.name == "STACK_GLOBAL":
                called.append(".".join(texts[-2:]))
            elif isinstance(argument, str):
                texts.append(argument)
    return called


def position_of(state: State) -> Position:
    """Return what the state says is finished."""
    return Position(epoch=state["epoch"], samples_in_epoch=state["samples_in_epoch"], step=state["step"])


def _assert_plain(value: object) -> None:
    """Assert that a value is made of tensors and plain types alone; a subclass of one would not load again."""
    if isinstance(value, dict):
        for key, member in value.items():
            _assert_plain(key)
            _assert_plain(member)
    elif isinstance(value, (list, tuple)):
        for member in value:
            _assert_plain(member)
    else:
        assert type(value) in _PLAIN, f"{type(value)} in a snapshot"

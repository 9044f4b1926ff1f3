"""What a snapshot file holds: plain data, every field of it, and nothing that runs."""

import io
import os
import pickle
import re
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from states import changed, small_state

from elastic_mnist.errors import SnapshotError, StoreError
from elastic_mnist.snapshots.state import State, pack, position_of, unpack
from elastic_mnist.training.sampler import Position

FIELDS = {
    "model": dict,
    "optimizer": dict,
    "epoch": int,
    "step": int,
    "samples_in_epoch": int,
    "global_batch_size": int,
    "micro_batch_size": int,
    "seed": int,
    "settings": dict,
    "contract": dict,
    "dataset": dict,
    "versions": dict,
    "world_size": int,
    "run_id": str,
    "generation": int,
    "started_at": float,
    "progress": dict,
}


class Trap:
    """An object whose unpickling makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


def saved(content: object) -> bytes:
    """Return what torch.save makes of something."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def same(one: object, other: object) -> bool:
    """Whether two states are the same in types, shapes and values."""
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other


def test_a_state_is_unpacked_as_it_was_packed() -> None:
    """Every field comes back, beside the format and its version."""
    state = small_state(30)
    assert same(unpack(pack(state)), {"format": "elastic_mnist.snapshot", "version": 1, **state})


def test_a_snapshot_loads_by_torch_alone_as_plain_data() -> None:
    """`torch.load(..., weights_only=True)` reads the model's weights, without this package."""
    loaded = torch.load(io.BytesIO(pack(small_state())), weights_only=True)
    assert torch.equal(loaded["model"]["weight"], small_state()["model"]["weight"])


def test_equal_states_have_equal_bytes() -> None:
    """Packing the same state twice gives the same file, so that digests can be compared."""
    assert pack(small_state(30)) == pack(small_state(30))


def test_the_position_is_that_of_the_fields() -> None:
    """Step 30 of epochs of 13 steps of 8 samples."""
    assert position_of(small_state(30)) == Position(epoch=2, samples_in_epoch=32, step=30)


@pytest.mark.parametrize("field", FIELDS)
def test_a_missing_field_is_named(field: str) -> None:
    """A file without one of the fields is refused with the field's name."""
    state = cast("dict[str, Any]", small_state())
    del state[field]
    with pytest.raises(SnapshotError, match=f"its field {field} is missing"):
        unpack(pack(cast("State", state)))


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_another_kind_is_named(field: str) -> None:
    """A file with a list in the place of a field is refused with the field's name."""
    with pytest.raises(SnapshotError, match=f"its field {field} is missing or not a {FIELDS[field].__name__}"):
        unpack(pack(changed(small_state(), **{field: [1]})))


@pytest.mark.parametrize("field", ["epoch", "step", "samples_in_epoch"])
def test_an_impossible_position_is_named(field: str) -> None:
    """A position below zero is no position."""
    with pytest.raises(SnapshotError, match=f"its field {field} is -1"):
        unpack(pack(changed(small_state(), **{field: -1})))


@pytest.mark.parametrize(
    "content",
    [{}, [1, 2], torch.zeros(3), {"format": "another"}, {"model": {"weight": torch.zeros(2)}}, {1: 2}, None],
    ids=["empty", "list", "tensor", "another format", "weights", "numbers", "none"],
)
def test_a_file_of_another_format_is_refused(content: object) -> None:
    """Plain data that is no snapshot of ours is refused with the name of our format."""
    with pytest.raises(SnapshotError, match=r"not of the format elastic_mnist\.snapshot"):
        unpack(saved(content))


@pytest.mark.parametrize("version", [0, -1, "1", None])
def test_a_file_of_another_version_is_refused(version: object) -> None:
    """The error names the version that it has and the one that is read."""
    state = {**small_state(), "format": "elastic_mnist.snapshot", "version": version}
    with pytest.raises(SnapshotError, match=f"^version {version}, this program reads 1$"):
        unpack(saved(state))


@pytest.mark.parametrize("version", [2, 300])
def test_a_file_of_a_later_version_is_whole_and_not_for_this_program(version: int) -> None:
    """It is no damage: a StoreError of one line names both versions and the way out."""
    state = {**small_state(), "format": "elastic_mnist.snapshot", "version": version}
    with pytest.raises(StoreError, match=f"^[^\n]* version {version}, this program reads 1; install a later one$"):
        unpack(saved(state))


ALLOCATOR = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "1 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "MemoryError"),
        (OSError(24, "Too many open files"), "Too many open files"),
        (ALLOCATOR, "not enough memory"),
    ],
    ids=["memory", "files", "torch's allocator"],
)
def test_a_process_in_trouble_does_not_call_a_snapshot_damaged(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory or no file descriptor while it is read is a StoreError that says so."""

    def load(*_: object, **__: object) -> NoReturn:
        raise error

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(StoreError, match=f"cannot be read here: .*{reason}"):
        unpack(pack(small_state()))


@pytest.mark.parametrize("protocol", ["torch", "pickle"])
def test_a_hostile_file_is_refused_and_nothing_of_it_is_run(protocol: str, tmp_path: Path) -> None:
    """A pickle that calls a function is a SnapshotError of one line, and the function is not called."""
    trap = {**small_state(), "format": "elastic_mnist.snapshot", "version": 1, "progress": Trap(tmp_path / "caught")}
    data = saved(trap) if protocol == "torch" else pickle.dumps(trap["progress"], protocol=2)
    with pytest.raises(SnapshotError, match=r"^not readable as plain data: [^\n]+$"):
        unpack(data)
    assert not (tmp_path / "caught").exists()
    torch.load(io.BytesIO(saved(trap)), weights_only=False)  # the trap is one: loaded without care, it snaps
    assert (tmp_path / "caught").exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@given(data=st.binary(max_size=200) | st.binary(max_size=9).map(lambda tail: b"\x80\x02" + tail))
@settings(max_examples=200, deadline=None)
def test_bytes_that_are_no_snapshot_are_refused(data: bytes) -> None:
    """Whatever the bytes, also behind the first two of a pickle, the error is a SnapshotError."""
    with pytest.raises(SnapshotError):
        unpack(data)


def test_a_snapshot_cut_anywhere_is_refused() -> None:
    """Cut at any 16th byte, the file is a SnapshotError."""
    data = pack(small_state())
    for size in range(0, len(data), 16):
        with pytest.raises(SnapshotError):
            unpack(data[:size])


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_damaged_snapshot_is_read_or_refused() -> None:
    """With any byte flipped the file is a SnapshotError where it is not read, or says another version of itself."""
    data, num_refused = pack(small_state()), 0
    for place in range(len(data)):
        for flip in (0x01, 0x40, 0xFF):
            damaged = bytearray(data)
            damaged[place] ^= flip
            try:
                unpack(bytes(damaged))
            except SnapshotError:
                num_refused += 1
            except StoreError as error:
                assert re.search("version [0-9]+, this program reads 1", str(error))  # noqa: PT017 - not each raises
    assert num_refused > 0


@pytest.mark.parametrize(
    "value",
    [torch.__version__, Path("here"), {1, 2}, b"bytes", object(), {"deep": [{"er": (Path("here"),)}]}],
    ids=["str's child", "path", "set", "bytes", "object", "nested"],
)
def test_what_is_not_plain_is_not_packed(value: object) -> None:
    """A type that a plain load refuses is our own bug, and is caught before it is written."""
    with pytest.raises(AssertionError):
        pack(small_state(progress={"value": value}))

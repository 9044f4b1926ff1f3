"""The durable tier: nothing damaged is ever loaded; it is logged, set aside, and the snapshot before it taken."""

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from states import (
    DATA_5,
    DATA_9,
    MANIFEST_5,
    MANIFEST_9,
    Fault,
    FaultyStorage,
    commit,
    manifest_of,
    newest_step,
    small_state,
)
from structlog.testing import capture_logs

from elastic_mnist.errors import SnapshotError, StoreError
from elastic_mnist.snapshots.durable import DurableTier
from elastic_mnist.snapshots.state import FORMAT, VERSION, pack
from elastic_mnist.snapshots.storage import LocalStorage

DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty data": lambda place: (place / DATA_9).write_bytes(b""),
    "half the data": lambda place: os.truncate(place / DATA_9, (place / DATA_9).stat().st_size // 2),
    "one byte less": lambda place: os.truncate(place / DATA_9, (place / DATA_9).stat().st_size - 1),
    "one byte more": lambda place: (place / DATA_9).write_bytes((place / DATA_9).read_bytes() + b"\0"),
    "missing data": lambda place: (place / DATA_9).unlink(),
    "another's data": lambda place: (place / DATA_9).write_bytes((place / DATA_5).read_bytes()),
    "empty manifest": lambda place: (place / MANIFEST_9).write_bytes(b""),
    "half the manifest": lambda place: os.truncate(place / MANIFEST_9, 200),
    "extra white space": lambda place: (place / MANIFEST_9).write_bytes((place / MANIFEST_9).read_bytes() + b"\n"),
    "not an object": lambda place: (place / MANIFEST_9).write_bytes(b"[1, 2]\n"),
    "another's manifest": lambda place: (place / MANIFEST_9).write_bytes((place / MANIFEST_5).read_bytes()),
}


@pytest.fixture(params=DAMAGES)
def damaged(request: pytest.FixtureRequest, storage: LocalStorage, tmp_path: Path) -> LocalStorage:
    """A place with a whole step 5 and a step 9 that is damaged in one of many ways."""
    commit(storage, 5)
    commit(storage, 9)
    assert newest_step(storage) == 9
    DAMAGES[request.param](tmp_path)
    return storage


def test_the_snapshot_before_a_damaged_one_is_taken(damaged: LocalStorage) -> None:
    """Step 5 is the newest that is whole."""
    assert newest_step(damaged) == 5


def test_a_damaged_snapshot_is_told_with_its_path_and_a_reason(damaged: LocalStorage, tmp_path: Path) -> None:
    """One warning `snapshot.rejected` names the data file and says why in one line."""
    with capture_logs() as events:
        newest_step(damaged)
    (event,) = events
    assert (event["event"], event["log_level"]) == ("snapshot.rejected", "warning")
    assert event["path"] == f"{tmp_path}/{DATA_9}"
    assert event["reason"]
    assert "\n" not in event["reason"]


def test_a_damaged_snapshot_is_kept_aside(damaged: LocalStorage, tmp_path: Path) -> None:
    """Its files are renamed with their bytes as they are, and step 5's stay."""
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    newest_step(damaged)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    aside = {DATA_9: f"{DATA_9}.rejected", MANIFEST_9: f"{MANIFEST_9}.rejected"}
    assert after == {aside.get(name, name): data for name, data in before.items()}


def test_a_damaged_snapshot_is_told_once(damaged: LocalStorage) -> None:
    """Set aside, it is not met again."""
    newest_step(damaged)
    with capture_logs() as events:
        assert newest_step(damaged) == 5
    assert events == []


def test_another_runs_place_is_left_as_it_is(damaged: LocalStorage, tmp_path: Path) -> None:
    """A read-only tier takes the snapshot before the damaged one, and changes no file."""
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    newest = DurableTier(damaged, read_only=True).newest_valid()
    assert newest is not None
    assert newest.state["step"] == 5
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_place_of_damaged_snapshots_alone_has_none(storage: LocalStorage, tmp_path: Path) -> None:
    """With every snapshot damaged there is no newest one."""
    for step in (5, 9):
        commit(storage, step)
        os.truncate(tmp_path / f"step-{step:08d}.pt", 10)
    assert newest_step(storage) is None


def test_no_flipped_byte_of_the_data_goes_unseen(storage: LocalStorage, tmp_path: Path) -> None:
    """Each byte of the data in turn, flipped, makes it one that is not to be loaded."""
    manifest, tier = commit(storage, 5), DurableTier(storage)
    whole = tier.load(manifest).data
    with (tmp_path / DATA_5).open("r+b", buffering=0) as file:
        for place in range(len(whole)):
            os.pwrite(file.fileno(), bytes([whole[place] ^ 0x10]), place)
            with pytest.raises(SnapshotError):
                tier.load(manifest)
            os.pwrite(file.fileno(), whole[place : place + 1], place)
    assert tier.load(manifest).data == whole


def test_a_position_that_is_not_the_manifests_is_refused(storage: LocalStorage) -> None:
    """Data of step 5 under a manifest that says another epoch is not loaded, right as both digests are."""
    state = small_state(5)
    data = pack(state)
    manifest = manifest_of(state, data, epoch=1)
    storage.put(manifest.data_name, data)
    storage.put(manifest.name, manifest.to_json())
    with pytest.raises(SnapshotError, match="position"):
        DurableTier(storage).load(manifest)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 1 bytes. Error code 12 (Cannot allocate memory)"
        ),
        RuntimeError("a bug of this very version of torch"),
    ],
    ids=["memory", "torch's allocator", "torch's bug"],
)
def test_whole_data_that_cannot_be_read_here_is_no_damage(
    error: Exception, storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its SHA-256 says, it is whole: a StoreError names its path, nothing is told as rejected, nothing set aside."""
    commit(storage, 5)
    manifest = commit(storage, 9)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    num_loads = 0

    def load(*_: object, **__: object) -> NoReturn:
        nonlocal num_loads
        num_loads += 1
        raise error

    with monkeypatch.context() as patched, capture_logs() as events:
        patched.setattr(torch, "load", load)
        tier = DurableTier(storage)
        for read in (tier.newest_valid, lambda: tier.load(manifest), lambda: commit(storage, 9)):
            with pytest.raises(StoreError, match=f"^{tmp_path}/{DATA_9}: whole, as its SHA-256 says, but [^\n]+$"):
                read()
    assert num_loads == 3
    assert events == []
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert newest_step(storage) == 9


def test_a_snapshot_of_a_later_version_is_neither_passed_over_nor_set_aside(
    storage: LocalStorage, tmp_path: Path
) -> None:
    """It is whole: no older snapshot is taken in its place, and no file is changed."""
    commit(storage, 5)
    state = small_state(9)
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, "version": VERSION + 1, **state}, buffer)
    manifest = manifest_of(state, buffer.getvalue())
    DurableTier(storage, keep_last=2).save(buffer.getvalue(), manifest)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(StoreError, match="install a later one"):
        DurableTier(storage).newest_valid()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("operation", ["names", "get"])
def test_an_error_of_access_is_never_read_as_no_snapshot(operation: str, storage: LocalStorage) -> None:
    """Wherever in the search access fails, it fails the search: no older snapshot is taken, nor none."""
    commit(storage, 5)
    commit(storage, 9)
    num_operations = {"names": 1, "get": 3}[operation]
    for at in range(num_operations):
        fault = Fault(at=at, of=(operation,), raises=StoreError("403"))
        with pytest.raises(StoreError, match="403"):
            DurableTier(FaultyStorage(storage, fault)).newest_valid()
        assert fault.num_fired == 1
    assert newest_step(storage) == 9

"""What a user names on a command line: a snapshot file, or the newest valid one at a place."""

import os
from pathlib import Path

import pytest
from states import DATA_5, DATA_9, commit, small_state

from elastic_mnist.errors import SnapshotError, UsageError
from elastic_mnist.snapshots.lookup import find
from elastic_mnist.snapshots.state import pack
from elastic_mnist.snapshots.storage import LocalStorage


def test_a_named_place_stands_for_its_newest_snapshot(storage: LocalStorage, tmp_path: Path) -> None:
    """The whole of it is found, and nothing damaged is newer."""
    commit(storage, 5)
    manifest = commit(storage, 9)
    found = find(str(tmp_path), named="snapshot")
    assert (found.path, found.manifest, found.num_damaged_newer) == (f"{tmp_path}/{DATA_9}", manifest, 0)
    assert found.data == pack(small_state(9)) == pack(found.state)


def test_the_damaged_newer_ones_of_a_named_place_are_counted(storage: LocalStorage, tmp_path: Path) -> None:
    """Of a whole step 5 and a damaged step 9, step 5 is found, with one damaged that is newer."""
    commit(storage, 5)
    commit(storage, 9)
    (tmp_path / DATA_9).write_bytes(b"damaged")
    found = find(str(tmp_path), named="snapshot")
    assert (found.path, found.num_damaged_newer) == (f"{tmp_path}/{DATA_5}", 1)


def test_a_named_file_is_found_with_its_manifest(storage: LocalStorage, tmp_path: Path) -> None:
    """Newest or not, the file that is named."""
    manifest = commit(storage, 5)
    commit(storage, 9)
    found = find(f"{tmp_path}/{DATA_5}", named="snapshot")
    assert (found.path, found.manifest, found.data) == (f"{tmp_path}/{DATA_5}", manifest, pack(small_state(5)))


def test_a_named_copy_is_found_without_a_manifest(tmp_path: Path) -> None:
    """Its bytes and its state are all that is known of it."""
    (tmp_path / "best.pt").write_bytes(pack(small_state(5)))
    found = find(f"{tmp_path}/best.pt", named="snapshot")
    assert (found.path, found.manifest, found.num_damaged_newer) == (f"{tmp_path}/best.pt", None, 0)
    assert found.data == pack(small_state(5)) == pack(found.state)


def test_a_named_place_of_damaged_snapshots_alone_is_damage(storage: LocalStorage, tmp_path: Path) -> None:
    """A SnapshotError counts them."""
    for step in (5, 9):
        commit(storage, step)
        os.truncate(tmp_path / f"step-{step:08d}.pt", 10)
    with pytest.raises(SnapshotError, match=f"^snapshot {tmp_path}: all of the 2 snapshots there are damaged"):
        find(str(tmp_path), named="snapshot")


@pytest.mark.parametrize("name", [DATA_9, "best.pt"], ids=["with manifest", "copy"])
def test_a_named_file_that_is_damaged_is_damage(name: str, storage: LocalStorage, tmp_path: Path) -> None:
    """A SnapshotError names it, and no other snapshot is taken in its place."""
    commit(storage, 5)
    commit(storage, 9)
    (tmp_path / name).write_bytes(b"damaged")
    with pytest.raises(SnapshotError, match=f"^snapshot {tmp_path}/{name}: "):
        find(f"{tmp_path}/{name}", named="snapshot")


@pytest.mark.parametrize(
    ("name", "reason"), [("", "no snapshot there"), ("/typo", "no snapshot there"), ("/typo.pt", "no such file")]
)
def test_a_name_of_nothing_is_the_users_to_put_right(name: str, reason: str, tmp_path: Path) -> None:
    """An empty place, a missing one and a missing file are a UsageError that says what is not there."""
    with pytest.raises(UsageError, match=f"^snapshot {tmp_path}{name}: {reason}; name another$"):
        find(f"{tmp_path}{name}", named="snapshot")

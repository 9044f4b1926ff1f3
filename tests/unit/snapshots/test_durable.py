"""The durable tier: the manifest is the commit, and nothing damaged is ever believed."""

import os
from pathlib import Path

from states import DATA_5, DATA_9, MANIFEST_5, MANIFEST_9, commit, newest_step, small_state

from elastic_mnist.snapshots.durable import DurableTier
from elastic_mnist.snapshots.state import pack
from elastic_mnist.snapshots.storage import LocalStorage, open_storage


def test_a_saved_snapshot_is_loaded_as_it_was(storage: LocalStorage) -> None:
    """The newest valid snapshot has the path, the manifest, the bytes and the state that were saved."""
    manifest = commit(storage, 5)
    newest = DurableTier(storage).newest_valid()
    assert newest is not None
    assert (newest.path, newest.manifest) == (storage.path(DATA_5), manifest)
    assert newest.data == pack(small_state(5)) == pack(newest.state)


def test_an_empty_place_has_no_snapshot(storage: LocalStorage) -> None:
    """Nothing there is None, not an error."""
    assert DurableTier(storage).newest_valid() is None


def test_the_names_are_those_of_the_documentation(storage: LocalStorage) -> None:
    """Step 590 lies in step-00000590.pt and step-00000590.json."""
    commit(storage, 590)
    assert sorted(storage.names()) == ["step-00000590.json", "step-00000590.pt"]


def test_the_largest_step_is_taken_whatever_was_touched_last(storage: LocalStorage, tmp_path: Path) -> None:
    """Beside step 1000, step 900 is the older one, also when its files are the newer ones."""
    commit(storage, 1000)
    commit(storage, 900)
    for name in ("step-00000900.pt", "step-00000900.json"):
        os.utime(tmp_path / name, (2e9, 2e9))
    assert newest_step(storage) == 1000


def test_the_largest_step_is_taken_beyond_eight_digits(storage: LocalStorage) -> None:
    """Steps are compared as numbers: 100000000 is after 99999999."""
    commit(storage, 99_999_999)
    commit(storage, 100_000_000)
    assert newest_step(storage) == 100_000_000


def test_data_without_a_manifest_does_not_exist(storage: LocalStorage) -> None:
    """Bytes that were never committed are not taken, whole as they may be."""
    storage.put(DATA_5, pack(small_state(5)))
    assert newest_step(storage) is None


def test_the_snapshot_before_uncommitted_data_is_taken(storage: LocalStorage) -> None:
    """Step 5 is the newest while step 9 has no manifest."""
    commit(storage, 5)
    storage.put(DATA_9, pack(small_state(9)))
    assert newest_step(storage) == 5


def test_an_object_store_holds_snapshots_too(tmp_path: Path) -> None:
    """On fsspec's memory file system the newest whole one of three is taken, and the damaged one set aside."""
    storage = open_storage(f"memory://{tmp_path}")
    for step in (1, 5, 9):
        commit(storage, step, keep_last=2)
    storage.put(DATA_9, b"damaged")
    assert newest_step(storage) == 5
    aside = [f"{DATA_9}.rejected", f"{MANIFEST_9}.rejected"]
    assert sorted(storage.names()) == sorted([DATA_5, MANIFEST_5, *aside])

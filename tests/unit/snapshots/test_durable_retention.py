"""The durable tier's writes: a fault at any of them costs no snapshot, and only what is superseded is removed."""

import os
from itertools import count
from pathlib import Path

import pytest
from states import (
    DATA_5,
    DATA_9,
    MANIFEST_9,
    Fault,
    FaultyStorage,
    ForgetfulStorage,
    Killed,
    commit,
    newest_step,
    small_state,
)
from structlog.testing import capture_logs

from elastic_mnist.errors import StoreError
from elastic_mnist.snapshots.durable import DurableTier
from elastic_mnist.snapshots.state import pack
from elastic_mnist.snapshots.storage import LocalStorage


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_retention_leaves_the_last_snapshots(keep_last: int, storage: LocalStorage) -> None:
    """After five saves the newest `keep_last` are there, whole, and no file of another."""
    manifests = [commit(storage, step, keep_last=keep_last) for step in (1, 2, 3, 4, 5)]
    kept = [name for manifest in manifests[-keep_last:] for name in (manifest.name, manifest.data_name)]
    assert sorted(storage.names()) == sorted(kept)
    assert newest_step(storage) == 5


def test_retention_removes_data_that_was_never_committed(storage: LocalStorage) -> None:
    """What an interrupted save left is gone after the next one."""
    storage.put(DATA_5, b"half a snapshot")
    commit(storage, 9)
    assert sorted(storage.names()) == [MANIFEST_9, DATA_9]


def test_retention_leaves_what_is_not_its_own(storage: LocalStorage) -> None:
    """The run's record, the user's files and what was set aside stay."""
    others = ["run.json", "notes.txt", "events.jsonl", f"{DATA_5}.rejected", "best-step-00000001.pt", "step-1.pt"]
    for name in others:
        storage.put(name, b"x")
    commit(storage, 9, keep_last=1)
    assert sorted(storage.names()) == sorted([*others, DATA_9, MANIFEST_9])


def test_retention_never_removes_what_was_just_saved(storage: LocalStorage, tmp_path: Path) -> None:
    """A damaged step 9 that could not be set aside does not cost the job the step 7 that it saves next."""
    commit(storage, 5)
    commit(storage, 9)
    os.truncate(tmp_path / DATA_9, 10)
    fault = Fault(at=None, of=("rename",), raises=StoreError("no renames today"))
    faulty = FaultyStorage(storage, fault)
    assert newest_step(faulty) == 5
    assert fault.num_fired > 0
    commit(faulty, 7, keep_last=1)
    assert newest_step(storage) == 7


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
def test_a_failing_delete_after_the_commit_does_not_fail_the_save(storage: LocalStorage, *, is_done: bool) -> None:
    """The save returns, tells of it as a warning, and the new snapshot is the newest."""
    commit(storage, 5)
    fault = Fault(at=None, of=("delete",), raises=StoreError("no deletes today"), is_done=is_done)
    with capture_logs() as events:
        commit(FaultyStorage(storage, fault), 9, keep_last=1)
    assert fault.num_fired == 1
    assert [(event["event"], event["log_level"]) for event in events[1:]] == [("snapshot.prune_failed", "warning")]
    assert newest_step(storage) == 9


def test_a_failing_put_fails_the_save(storage: LocalStorage) -> None:
    """A save whose data or manifest cannot be written raises, and tells of no saved snapshot."""
    for at in (0, 1):
        fault = Fault(at=at, of=("put_if_match",), raises=StoreError("disk full"))
        with capture_logs() as events, pytest.raises(StoreError, match="disk full"):
            commit(FaultyStorage(storage, fault), 9)
        assert fault.num_fired == 1
        assert events == []


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("raises", [StoreError("no access"), Killed()], ids=["error", "kill"])
def test_a_fault_at_any_operation_of_a_save_leaves_the_old_snapshot_or_the_new_one(
    raises: BaseException, tmp_path: Path, *, is_done: bool
) -> None:
    """Failed before or after each operation in turn, a save leaves 5 or 9 as the newest, and all manifests true."""
    found = []
    for at in count():
        storage = LocalStorage(tmp_path / str(at))
        storage.create()
        for step in (1, 5):
            commit(storage, step)
        storage.put("step-00000003.pt", b"never committed")
        fault = Fault(at=at, raises=raises, is_done=is_done)
        try:
            commit(FaultyStorage(storage, fault), 9, keep_last=1)
        except (StoreError, Killed):
            has_failed = True
        else:
            has_failed = False
        if not fault.num_fired:  # it has no more operations
            break
        for manifest in DurableTier(storage).manifests():
            assert DurableTier(storage).load(manifest).data == pack(small_state(manifest.step))
        found.append(newest_step(storage))
        assert found[-1] == 9 or (found[-1] == 5 and has_failed)
    # A look for the manifest; then data and manifest are each looked at, put and read back. Six operations follow: a
    # listing, and the removal of five files of steps 1, 3 and 5.
    assert found == [9 if index > 5 or (index == 5 and is_done) else 5 for index in range(len(found))]
    assert len(found) == 1 + 6 + 1 + 5


@pytest.mark.parametrize("instead", [None, b"", b"damaged"], ids=["nothing", "empty", "damaged"])
@pytest.mark.parametrize("name", [DATA_9, MANIFEST_9])
def test_a_save_that_does_not_read_back_fails(name: str, instead: bytes | None, storage: LocalStorage) -> None:
    """Where the store keeps something else, the save raises with the file's path, and tells of no saved snapshot."""
    with capture_logs() as events, pytest.raises(StoreError, match=f"^{storage.path(name)}: does not read back"):
        commit(ForgetfulStorage(storage, name, instead), 9)
    assert events == []


@pytest.mark.parametrize("instead", [None, b"", b"damaged"], ids=["nothing", "empty", "damaged"])
@pytest.mark.parametrize("name", [DATA_9, MANIFEST_9])
def test_a_save_that_does_not_read_back_costs_no_older_snapshot(
    name: str, instead: bytes | None, storage: LocalStorage
) -> None:
    """What retention would have removed after the save is there, and step 5 is the newest."""
    for step in (1, 5):
        commit(storage, step)
    before = storage.names()
    with pytest.raises(StoreError):
        commit(ForgetfulStorage(storage, name, instead), 9, keep_last=1)
    assert {*before} <= {*storage.names()}
    assert newest_step(storage) == 5


def test_a_local_save_is_not_read_back(tmp_path: Path) -> None:
    """The page cache would answer: what is synced without an error is believed, and 15 MB are not read."""
    read: list[str] = []

    class Watched(LocalStorage):
        def get(self, name: str) -> bytes:
            read.append(name)
            return super().get(name)

    commit(Watched(tmp_path), 9)
    assert read == [MANIFEST_9]  # whether there is one


def test_data_that_does_not_read_back_is_not_committed(storage: LocalStorage) -> None:
    """Without its data safe, a manifest is not written at all."""
    with pytest.raises(StoreError):
        commit(ForgetfulStorage(storage, DATA_9, b"damaged"), 9)
    assert storage.names() == [DATA_9]

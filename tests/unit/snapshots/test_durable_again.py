"""The durable tier: a step that is saved again with another state is one or the other at every moment."""

from itertools import count
from pathlib import Path

import pytest
from states import EVALUATED_13, STATE_13, Fault, FaultyStorage, Killed, manifest_13, small_state
from structlog.testing import capture_logs

from elastic_mnist.errors import StoreError
from elastic_mnist.snapshots.durable import DurableTier, Snapshot
from elastic_mnist.snapshots.listing import look
from elastic_mnist.snapshots.state import State, pack
from elastic_mnist.snapshots.storage import LocalStorage, Storage


def newest_13(storage: Storage) -> Snapshot:
    """Return the newest snapshot, one of the states of step 13, whole and under its own manifest; none is rejected."""
    with capture_logs() as events:
        newest = DurableTier(storage).newest_valid()
    assert events == []
    assert newest is not None
    assert newest.data in (pack(STATE_13), pack(EVALUATED_13))
    assert newest.manifest == manifest_13(newest.state)
    return newest


def save_13(storage: Storage, state: State) -> None:
    """Save one of the states of step 13."""
    DurableTier(storage, keep_last=1).save(pack(state), manifest_13(state))


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("raises", [StoreError("no access"), Killed()], ids=["error", "kill"])
def test_a_fault_at_any_operation_of_saving_a_step_again_leaves_the_old_state_or_the_new_one(
    raises: BaseException, tmp_path: Path, *, is_done: bool
) -> None:
    """Another state of a step that is committed: at no moment is there none, and no doubt about the one there is.

    Failed before or after each operation in turn, and after a later save without faults, which makes it the new one.
    """
    found = []
    for at in count():
        storage = LocalStorage(tmp_path / str(at))
        storage.create()
        save_13(storage, STATE_13)
        fault = Fault(at=at, raises=raises, is_done=is_done)
        try:
            save_13(FaultyStorage(storage, fault), EVALUATED_13)
        except (StoreError, Killed):
            has_failed = True
        else:
            has_failed = False
        if not fault.num_fired:  # it has no more operations
            break
        found.append(newest_13(storage).data == pack(EVALUATED_13))
        assert found[-1] or has_failed
        assert look(storage.location, verify=True).verdict == "whole"
        save_13(storage, EVALUATED_13)
        assert newest_13(storage).data == pack(EVALUATED_13)
        assert look(storage.location, verify=True).verdict == "whole"
        assert sorted(storage.names()) == ["step-00000013.json", "step-00000013.pt"]
    # A look for the manifest and for its data; then manifest and data are each looked at, put and read back; then a
    # listing, with nothing to remove.
    assert found == [index > 6 or (index == 6 and is_done) for index in range(len(found))]
    assert len(found) == 2 + 6 + 1


def test_a_step_that_was_saved_again_is_listed_as_the_state_that_is_there(storage: LocalStorage) -> None:
    """Also where only the manifest was written: `elastic-mnist inspect` shows the accuracy of what a job would load."""
    save_13(storage, STATE_13)
    fault = Fault(at=1, of=("put_if_match",), raises=StoreError("disk full"))
    with pytest.raises(StoreError, match="disk full"):
        save_13(FaultyStorage(storage, fault), EVALUATED_13)
    assert fault.num_fired == 1
    for state in (STATE_13, EVALUATED_13):
        (entry,) = look(storage.location, verify=True).entries
        assert newest_13(storage).data == pack(state)
        assert entry.test_accuracy == manifest_13(state).test_accuracy
        save_13(storage, EVALUATED_13)


def test_a_snapshot_that_is_replaced_while_it_is_read_is_read_again(storage: LocalStorage, tmp_path: Path) -> None:
    """Whoever has read the manifest before another one was committed believes the new one, and sets nothing aside."""
    DurableTier(storage).save(pack(STATE_13), manifest_13(STATE_13))
    was_asked: list[str] = []

    class Reader(LocalStorage):
        def get(self, name: str) -> bytes:
            if name.endswith(".pt") and not was_asked:
                was_asked.append(name)
                DurableTier(storage).save(pack(EVALUATED_13), manifest_13(EVALUATED_13))
            return super().get(name)

    newest = DurableTier(Reader(tmp_path)).newest_valid()
    assert was_asked
    assert newest is not None
    assert newest.data == pack(EVALUATED_13)
    assert len(storage.names()) == 2


def test_the_same_state_saved_again_is_not_written_again(storage: LocalStorage, tmp_path: Path) -> None:
    """A first try that was not lost, its answer alone, is the snapshot: no file changes."""
    save_13(storage, EVALUATED_13)
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    save_13(storage, EVALUATED_13)
    assert {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tmp_path.iterdir()} == before


def test_a_third_state_of_a_step_replaces_the_one_that_is_there(storage: LocalStorage) -> None:
    """After a save of the second broke off between its two writes, the first is there until the third is."""
    third = small_state(13, progress={"loss": 0.5, "num_steps": 13, "test_accuracy": 0.8})
    save_13(storage, STATE_13)
    for at in (0, 1):
        fault = Fault(at=1, of=("put_if_match",), raises=Killed())
        with pytest.raises(Killed):
            save_13(FaultyStorage(storage, fault), (EVALUATED_13, third)[at])
        assert fault.num_fired == 1
        assert newest_13(storage).data == pack(STATE_13)
    save_13(storage, third)
    newest = DurableTier(storage).newest_valid()
    assert newest is not None
    assert (newest.data, newest.manifest) == (pack(third), manifest_13(third))

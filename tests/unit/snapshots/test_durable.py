"""The durable tier: the manifest is the commit, and nothing damaged is ever believed."""

import hashlib
import io
import json
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from states import Fault, FaultyStorage, ForgetfulStorage, Killed, commit, manifest_of, small_state
from structlog.testing import capture_logs

from elastic_mnist.errors import SnapshotError, StoreError, UsageError
from elastic_mnist.snapshots.durable import DurableTier, Snapshot
from elastic_mnist.snapshots.listing import look
from elastic_mnist.snapshots.lookup import find
from elastic_mnist.snapshots.manifest import Manifest
from elastic_mnist.snapshots.state import FORMAT, VERSION, State, pack
from elastic_mnist.snapshots.storage import LocalStorage, Storage, open_storage
from elastic_mnist.training.sampler import Position

DATA_5, MANIFEST_5 = "step-00000005.pt", "step-00000005.json"
DATA_9, MANIFEST_9 = "step-00000009.pt", "step-00000009.json"


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    """An empty directory."""
    return LocalStorage(tmp_path)


def newest_step(storage: Storage) -> int | None:
    """Return the step of the newest valid snapshot, after a check of its bytes."""
    newest = DurableTier(storage).newest_valid()
    if newest is None:
        return None
    assert newest.manifest is not None
    assert newest.data == pack(small_state(newest.manifest.step))
    return newest.manifest.step


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


def test_a_manifest_nested_beyond_reason_is_damaged() -> None:
    """JSON too deep for its parser is a damaged manifest like any other, not a crash of the job."""
    with pytest.raises(SnapshotError):
        Manifest.from_json(b"[" * 200_000, MANIFEST_5)


def test_no_flipped_bit_of_a_manifest_goes_unseen() -> None:
    """Each bit of a manifest in turn, flipped, makes it one that is not to be believed."""
    data = pack(small_state(5))
    whole = manifest_of(small_state(5), data).to_json()
    Manifest.from_json(whole, MANIFEST_5)
    for place in range(len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << bit
            with pytest.raises(SnapshotError):
                Manifest.from_json(bytes(flipped), MANIFEST_5)


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


STATE_13 = small_state(13)
EVALUATED_13 = small_state(13, progress={"loss": 0.5, "num_steps": 13, "test_accuracy": 0.9})


def manifest_13(state: State) -> Manifest:
    """Return the manifest of one of the states of step 13."""
    return manifest_of(state, pack(state), test_accuracy=state["progress"].get("test_accuracy"))


@pytest.mark.parametrize("accuracy", [None, 0.1 + 0.2, 1.0])
def test_a_manifest_is_read_as_it_was_written(accuracy: float | None) -> None:
    """Every field comes back, a missing accuracy and one of many digits too."""
    manifest = manifest_of(small_state(5), pack(small_state(5)), test_accuracy=accuracy)
    assert Manifest.from_json(manifest.to_json(), MANIFEST_5) == manifest


def test_a_manifest_is_read_with_the_one_that_it_replaces() -> None:
    """Every field of both comes back."""
    manifest = replace(manifest_13(EVALUATED_13), replaces=manifest_13(STATE_13))
    assert Manifest.from_json(manifest.to_json(), "step-00000013.json") == manifest


def test_no_flipped_bit_of_a_manifest_that_replaces_another_goes_unseen() -> None:
    """Each bit in turn, flipped, also of what is replaced, makes it one that is not to be believed."""
    whole = replace(manifest_13(EVALUATED_13), replaces=manifest_13(STATE_13)).to_json()
    Manifest.from_json(whole, "step-00000013.json")
    for place in range(len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << bit
            with pytest.raises(SnapshotError):
                Manifest.from_json(bytes(flipped), "step-00000013.json")


def test_a_manifest_that_replaces_none_is_that_of_older_programs() -> None:
    """Eleven facts and their digest, and no word of another: either program reads what the other has written."""
    manifest = manifest_of(small_state(5), pack(small_state(5)))
    names = (
        *("step", "epoch", "samples_in_epoch", "size_bytes", "sha256", "weights_sha256", "settings_fingerprint"),
        *("run_id", "generation", "created_at", "test_accuracy"),
    )
    facts = {name: getattr(manifest, name) for name in names}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    older = json.dumps({**facts, "manifest_sha256": digest}, indent=1).encode() + b"\n"
    assert Manifest.from_json(older, MANIFEST_5) == manifest
    assert manifest.to_json() == older


def test_a_manifest_knows_its_position() -> None:
    """Epoch, samples and step are those of the state: step 30 of epochs of 13 steps is 4 steps into the third."""
    manifest = manifest_of(small_state(30), pack(small_state(30)))
    assert manifest.position == Position(epoch=2, samples_in_epoch=32, step=30)


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


def test_data_that_does_not_read_back_is_not_committed(storage: LocalStorage) -> None:
    """Without its data safe, a manifest is not written at all."""
    with pytest.raises(StoreError):
        commit(ForgetfulStorage(storage, DATA_9, b"damaged"), 9)
    assert storage.names() == [DATA_9]


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


def test_an_object_store_holds_snapshots_too(tmp_path: Path) -> None:
    """On fsspec's memory file system the newest whole one of three is taken, and the damaged one set aside."""
    storage = open_storage(f"memory://{tmp_path}")
    for step in (1, 5, 9):
        commit(storage, step, keep_last=2)
    storage.put(DATA_9, b"damaged")
    assert newest_step(storage) == 5
    aside = [f"{DATA_9}.rejected", f"{MANIFEST_9}.rejected"]
    assert sorted(storage.names()) == sorted([DATA_5, MANIFEST_5, *aside])


def test_a_named_place_stands_for_its_newest_snapshot(storage: LocalStorage, tmp_path: Path) -> None:
    """The whole of it is found, and nothing damaged is newer."""
    commit(storage, 5)
    manifest = commit(storage, 9)
    found = find(str(tmp_path), named="snapshot")
    assert (found.path, found.manifest, found.num_damaged_newer) == (f"{tmp_path}/{DATA_9}", manifest, 0)
    assert found.data == pack(small_state(9)) == pack(found.state)


@pytest.mark.usefixtures("damaged")
def test_the_damaged_newer_ones_of_a_named_place_are_counted(tmp_path: Path) -> None:
    """Of a whole step 5 and a damaged step 9, step 5 is found, with one damaged that is newer."""
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

"""One contract for every place where snapshots are kept; a class of tests inherits it for each backend."""

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from elastic_mnist.errors import StoreConflict
from elastic_mnist.snapshots.storage import Storage, open_storage

Value = TypeVar("Value")


class StorageContract(ABC):
    """What `Storage` promises; inherited once for each backend."""

    @pytest.fixture
    @abstractmethod
    def location(self, tmp_path: Path) -> str:
        """A place that does not exist yet."""

    @pytest.fixture
    def storage(self, location: str) -> Storage:
        """A place that exists and is empty."""
        storage = open_storage(location)
        storage.create()
        return storage

    def test_an_object_is_got_as_it_was_put(self, storage: Storage) -> None:
        """Every byte value comes back."""
        storage.put("a.pt", bytes(range(256)) * 3)
        assert storage.get("a.pt") == bytes(range(256)) * 3

    def test_an_empty_object_is_an_object(self, storage: Storage) -> None:
        """No bytes are bytes too."""
        storage.put("a.pt", b"")
        assert storage.get("a.pt") == b""

    def test_a_put_replaces_what_was_there(self, storage: Storage) -> None:
        """The second put's bytes are got, also where they are fewer."""
        storage.put("a.pt", b"the first one")
        storage.put("a.pt", b"2nd")
        assert storage.get("a.pt") == b"2nd"

    def test_objects_are_told_apart_by_their_names(self, storage: Storage) -> None:
        """Two names hold their own bytes."""
        storage.put("a.pt", b"one")
        storage.put("b.pt", b"two")
        assert (storage.get("a.pt"), storage.get("b.pt")) == (b"one", b"two")

    def test_all_objects_are_named(self, storage: Storage) -> None:
        """The names are those that were put, each once."""
        for name in ("a.pt", "b.json", "a.pt"):
            storage.put(name, b"x")
        assert sorted(storage.names()) == ["a.pt", "b.json"]

    def test_what_another_one_wrote_is_seen_at_once(self, storage: Storage, location: str) -> None:
        """Names are read past any cache of a listing made before."""
        assert storage.names() == []
        open_storage(location).put("a.pt", b"x")
        assert storage.names() == ["a.pt"]

    def test_a_missing_object_is_a_file_not_found(self, storage: Storage) -> None:
        """Getting what is not there is FileNotFoundError, and nothing else."""
        with pytest.raises(FileNotFoundError):
            storage.get("a.pt")

    def test_an_object_in_a_missing_place_is_a_file_not_found(self, location: str) -> None:
        """Where the place itself is not there, no object is."""
        with pytest.raises(FileNotFoundError):
            open_storage(location).get("a.pt")

    def test_a_missing_place_lists_empty(self, location: str) -> None:
        """A place that was never made holds no objects."""
        assert open_storage(location).names() == []

    def test_opening_makes_nothing(self, location: str, tmp_path: Path) -> None:
        """Opening, listing and getting leave no trace."""
        storage = open_storage(location)
        storage.names()
        with pytest.raises(FileNotFoundError):
            storage.get("a.pt")
        assert list(tmp_path.rglob("*")) == []

    def test_a_place_can_be_made_twice(self, storage: Storage) -> None:
        """Making a place that is there changes none of its objects."""
        storage.put("a.pt", b"x")
        storage.create()
        assert storage.get("a.pt") == b"x"

    def test_a_deleted_object_is_gone(self, storage: Storage) -> None:
        """It is neither got nor named."""
        storage.put("a.pt", b"x")
        storage.delete("a.pt")
        assert storage.names() == []
        with pytest.raises(FileNotFoundError):
            storage.get("a.pt")

    def test_deleting_what_is_not_there_is_fine(self, storage: Storage) -> None:
        """A delete can be repeated, and leaves the others."""
        storage.put("a.pt", b"x")
        storage.delete("b.pt")
        assert storage.names() == ["a.pt"]

    def test_a_renamed_object_has_its_new_name_alone(self, storage: Storage) -> None:
        """Its bytes are under the new name, and nothing under the old one."""
        storage.put("a.pt", b"x")
        storage.rename("a.pt", "b.pt")
        assert storage.get("b.pt") == b"x"
        assert storage.names() == ["b.pt"]

    def test_renaming_replaces_what_had_the_name(self, storage: Storage) -> None:
        """An object that had the new name is gone."""
        storage.put("a.pt", b"x")
        storage.put("b.pt", b"y")
        storage.rename("a.pt", "b.pt")
        assert storage.get("b.pt") == b"x"

    def test_renaming_what_is_not_there_is_a_file_not_found(self, storage: Storage) -> None:
        """There is nothing to rename."""
        with pytest.raises(FileNotFoundError):
            storage.rename("a.pt", "b.pt")

    def test_a_path_names_place_and_object(self, storage: Storage, location: str) -> None:
        """People find an object by what `path` returns."""
        assert storage.path("a.pt") == f"{location}/a.pt"

    def test_a_put_leaves_one_object(self, storage: Storage) -> None:
        """After puts and a conditional one, there are the objects and nothing beside them."""
        storage.put("a.pt", b"x")
        storage.put("a.pt", b"y")
        storage.put_if_match("run.json", b"x", None)
        assert sorted(storage.names()) == ["a.pt", "run.json"]

    def test_a_missing_object_has_no_version(self, storage: Storage) -> None:
        """The etag of what is not there is None."""
        assert storage.etag("a.pt") is None

    def test_an_object_in_a_missing_place_has_no_version(self, location: str) -> None:
        """Where the place itself is not there, no object has one."""
        assert open_storage(location).etag("a.pt") is None

    def test_a_version_stays_while_nobody_writes(self, storage: Storage, location: str) -> None:
        """All who ask get the same etag, also after reads and after writes of other objects."""
        storage.put("a.pt", b"x")
        etag = storage.etag("a.pt")
        storage.get("a.pt")
        storage.put("b.pt", b"y")
        assert etag is not None
        assert [storage.etag("a.pt"), open_storage(location).etag("a.pt")] == [etag, etag]

    def test_other_bytes_have_another_version(self, storage: Storage, location: str) -> None:
        """A write of as many others by anybody, and a delete, are seen at once."""
        etags = [storage.etag("a.pt")]
        for data in (b"one", b"two"):
            open_storage(location).put("a.pt", data)
            etags.append(storage.etag("a.pt"))
        assert len(set(etags)) == 3
        open_storage(location).delete("a.pt")
        assert storage.etag("a.pt") is None

    def test_a_conditional_put_makes_what_is_not_there(self, storage: Storage) -> None:
        """Under the condition of absence, an object is written where there is none, and its etag returned."""
        etag = storage.put_if_match("a.pt", bytes(range(256)), None)
        assert (storage.get("a.pt"), storage.etag("a.pt")) == (bytes(range(256)), etag)

    def test_a_conditional_put_makes_its_place(self, location: str) -> None:
        """A place that is not there yet is made, as by `put`."""
        open_storage(location).put_if_match("a.pt", b"x", None)
        assert open_storage(location).get("a.pt") == b"x"

    def test_a_conditional_put_replaces_the_version_it_names(self, storage: Storage) -> None:
        """At the etag that `etag` or the last `put_if_match` has returned, an object is replaced, time and again."""
        storage.put("a.pt", b"first")
        etag = storage.etag("a.pt")
        for data in (b"2nd", b"third one"):
            etag = storage.put_if_match("a.pt", data, etag)
            assert (storage.get("a.pt"), storage.etag("a.pt")) == (data, etag)

    def test_a_conditional_put_of_what_is_there_already_is_a_conflict(self, storage: Storage) -> None:
        """Under the condition of absence, an object that is there stays, even where it holds the same bytes."""
        storage.put("a.pt", b"old")
        for data in (b"new", b"old"):
            with pytest.raises(StoreConflict):
                storage.put_if_match("a.pt", data, None)
        assert storage.get("a.pt") == b"old"

    def test_a_conditional_put_made_twice_is_a_conflict(self, storage: Storage) -> None:
        """A writer who makes an object again that it has made itself is told that it is there."""
        storage.put_if_match("a.pt", b"x", None)
        with pytest.raises(StoreConflict):
            storage.put_if_match("a.pt", b"x", None)

    def test_a_conditional_put_at_an_older_version_is_a_conflict(self, storage: Storage, location: str) -> None:
        """What another one has written meanwhile stays; the error is one line that names option, place and object."""
        stale = storage.put_if_match("a.pt", b"old", None)
        open_storage(location).put_if_match("a.pt", b"new", stale)
        with pytest.raises(StoreConflict, match=f"^--snapshot_path {location}: a.pt .*another.*; .+$"):
            storage.put_if_match("a.pt", b"mine", stale)
        assert storage.get("a.pt") == b"new"

    def test_a_conditional_put_of_what_is_gone_is_a_conflict(self, storage: Storage) -> None:
        """At the etag of an object that has been removed, nothing is written."""
        etag = storage.put_if_match("a.pt", b"old", None)
        storage.delete("a.pt")
        with pytest.raises(StoreConflict):
            storage.put_if_match("a.pt", b"new", etag)
        assert storage.names() == []

    def test_the_number_of_open_files_stays_flat(self, storage: Storage) -> None:
        """After 200 writes and reads, no more files and sockets are open than after the first ones."""
        process = psutil.Process()
        num_open = []
        for number in range(201):
            data = number.to_bytes(2, "big")
            if number % 2:
                storage.put("a.pt", data)
            else:
                storage.put_if_match("a.pt", data, storage.etag("a.pt"))
            assert storage.get("a.pt") == data
            num_open.append(process.num_fds())
        assert num_open[-1] <= num_open[0]


class FencedContract(StorageContract):
    """What a storage with atomic conditional puts promises beside."""

    def test_it_says_that_its_conditional_puts_are_atomic(self, storage: Storage) -> None:
        """Callers can tell."""
        assert storage.has_conditional_put

    def test_of_writers_who_make_an_object_at_once_exactly_one_succeeds(self, storage: Storage, location: str) -> None:
        """Of those who find nothing there one writes, and its bytes are there; all others are told of a conflict."""
        for name, *claims in zip(CLAIMED, *race(location, claim), strict=True):
            assert [data for data in claims if data is not None] == [storage.get(name)]

    def test_of_writers_who_add_to_an_object_none_is_lost(self, storage: Storage, location: str) -> None:
        """All count in one object, each of them again after a conflict: the count is exact."""
        storage.put("run.json", b"0")
        assert sum(race(location, count_to_ten)) > 0  # they did meet
        assert storage.get("run.json") == b"%d" % (10 * NUM_WRITERS)


NUM_WRITERS = 4

CLAIMED = [f"step-{step:08d}.json" for step in range(20)]


def claim(storage: Storage) -> list[bytes | None]:
    """Try to make some objects with bytes of one's own; return them, None where another one came first."""
    made: list[bytes | None] = []
    for name in CLAIMED:
        data = os.urandom(8)
        try:
            storage.put_if_match(name, data, None)
            made.append(data)
        except StoreConflict:
            made.append(None)
    return made


def count_to_ten(storage: Storage) -> int:
    """Add one to a number, ten times; return how often another one came first."""
    num_conflicts = num_added = 0
    while num_added < 10:
        etag = storage.etag("run.json")
        number = int(storage.get("run.json"))  # may be newer than the etag: then there is a conflict
        try:
            storage.put_if_match("run.json", b"%d" % (number + 1), etag)
            num_added += 1
        except StoreConflict:
            num_conflicts += 1
    return num_conflicts


def race(location: str, act: Callable[[Storage], Value]) -> list[Value]:
    """Let the writers act at once, each with a storage of its own."""
    start = threading.Barrier(NUM_WRITERS)

    def write(_: int) -> Value:
        storage = open_storage(location)
        storage.names()  # connected
        start.wait(30)
        return act(storage)

    with ThreadPoolExecutor(NUM_WRITERS) as writers:
        return list(writers.map(write, range(NUM_WRITERS)))

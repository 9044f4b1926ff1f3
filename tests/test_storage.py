"""Where snapshots are kept: one contract for every backend, and what a local directory promises beyond it."""

import os
import subprocess
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_mnist.errors import StoreError
from elastic_mnist.snapshots.storage import LocalStorage, ObjectStorage, Storage, open_storage


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

    def test_a_place_that_cannot_be_written_is_a_store_error_that_names_it(
        self, storage: Storage, location: str
    ) -> None:
        """Below an object there is no place: the error is one line, with option and location."""
        storage.put("taken", b"x")
        with pytest.raises(StoreError, match=f"^--snapshot_path {location}/taken: cannot write a.pt: .+$"):
            open_storage(f"{location}/taken").put("a.pt", b"x")


class TestLocal(StorageContract):
    """A directory keeps the contract."""

    @pytest.fixture
    def location(self, tmp_path: Path) -> str:
        """A directory whose parent is missing too."""
        return str(tmp_path / "some" / "where")


class TestMemory(StorageContract):
    """fsspec's memory file system keeps the contract, and stands for the object stores."""

    @pytest.fixture
    def location(self, tmp_path: Path) -> str:
        """A URL that no other test uses."""
        return f"memory://{tmp_path.name}-{uuid.uuid4().hex}/snapshots"


def test_a_url_opens_an_object_store() -> None:
    """memory:// is no directory's name."""
    assert isinstance(open_storage("memory://snapshots"), ObjectStorage)


@pytest.mark.parametrize("prefix", ["", "file://", "local://"])
def test_a_directory_or_its_url_opens_that_directory(prefix: str, tmp_path: Path) -> None:
    """A plain path and its file URL are the same local place."""
    LocalStorage(tmp_path).put("a.pt", b"x")
    assert open_storage(f"{prefix}{tmp_path}").get("a.pt") == b"x"


def test_a_file_in_the_way_is_not_an_empty_place(tmp_path: Path) -> None:
    """A regular file where the directory should be cannot be listed: a StoreError, never "no snapshots"."""
    (tmp_path / "taken").write_bytes(b"x")
    with pytest.raises(StoreError, match=f"^--snapshot_path {tmp_path}/taken: cannot list it: .+$"):
        open_storage(str(tmp_path / "taken")).names()


def test_a_file_in_the_way_is_told_when_the_place_is_made(tmp_path: Path) -> None:
    """Making a directory where a regular file lies is a StoreError, and leaves the file."""
    (tmp_path / "taken").write_bytes(b"x")
    with pytest.raises(StoreError, match=f"^--snapshot_path {tmp_path}/taken: cannot create it: .+$"):
        open_storage(str(tmp_path / "taken")).create()
    assert (tmp_path / "taken").read_bytes() == b"x"


def test_a_file_in_the_way_is_not_a_missing_object(tmp_path: Path) -> None:
    """Getting from below a regular file is a StoreError, never FileNotFoundError."""
    (tmp_path / "taken").write_bytes(b"x")
    with pytest.raises(StoreError, match=r"cannot read a\.pt"):
        open_storage(str(tmp_path / "taken")).get("a.pt")


def test_a_directory_that_has_vanished_is_made_anew_by_the_next_put(tmp_path: Path) -> None:
    """Where somebody has removed the directory of a job at work, the next snapshot is there all the same."""
    storage = open_storage(str(tmp_path / "snapshots"))
    storage.create()
    (tmp_path / "snapshots").rmdir()
    storage.put("a.pt", b"x")
    assert storage.get("a.pt") == b"x"


def test_a_relative_path_stays_where_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later change of the working directory moves nothing."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    storage = open_storage("snapshots")
    storage.create()
    monkeypatch.chdir(tmp_path / "elsewhere")
    storage.put("a.pt", b"x")
    assert (tmp_path / "snapshots" / "a.pt").read_bytes() == b"x"


def test_a_put_does_not_use_the_system_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A TMPDIR that cannot be used, as one on another file system cannot for a rename, is of no matter."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    monkeypatch.setattr("tempfile.tempdir", None)
    storage = LocalStorage(tmp_path)
    storage.put("a.pt", b"x")
    assert storage.get("a.pt") == b"x"


@pytest.fixture(params=[0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set a umask, and set the old one again."""
    before = os.umask(request.param)
    yield int(request.param)
    os.umask(before)


def test_a_file_has_the_mode_that_the_umask_says(umask: int, tmp_path: Path) -> None:
    """0644 under 022 and 0600 under 077, like any file a program makes."""
    LocalStorage(tmp_path).put("a.pt", b"x")
    assert (tmp_path / "a.pt").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_put_leaves_nothing_beside_its_object(tmp_path: Path) -> None:
    """The directory holds the object and no temporary file."""
    LocalStorage(tmp_path).put("a.pt", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


@pytest.fixture
def interrupted(tmp_path: Path) -> LocalStorage:
    """A directory with an old object, in which a writer of a new one was killed as it called fsync."""
    storage = LocalStorage(tmp_path)
    storage.put("a.pt", b"old")
    code = (
        "import os, signal, sys; from pathlib import Path;"
        "from elastic_mnist.snapshots.storage import LocalStorage;"
        "os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL);"
        "LocalStorage(Path(sys.argv[1])).put('a.pt', b'new')"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert killed.returncode == -9
    assert len(list(tmp_path.iterdir())) == 2  # the fault fired with the temporary file there
    return storage


def test_what_an_interrupted_write_left_is_not_an_object(interrupted: LocalStorage) -> None:
    """A temporary file is not listed."""
    assert interrupted.names() == ["a.pt"]


def test_what_an_interrupted_write_left_is_removed_when_the_place_is_made(
    interrupted: LocalStorage, tmp_path: Path
) -> None:
    """The next create removes the temporary files of our names, and nothing else: other hidden files are the user's."""
    for name in (".step-00000005.pt.123.tmp", ".step-00000005.json.123.tmp", ".run.json.123.tmp", ".notes.tmp"):
        (tmp_path / name).write_bytes(b"half")
    theirs = {path.name for path in tmp_path.iterdir() if path.name.startswith((".a.pt", ".notes"))}
    interrupted.create()
    assert {path.name for path in tmp_path.iterdir()} == {"a.pt", *theirs}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], check=False, capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"mounting a tmpfs is not permitted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_a_store_error(small_disk: Path) -> None:
    """An object that does not fit is told with option and cause."""
    with pytest.raises(StoreError, match=f"^--snapshot_path {small_disk}: cannot write a.pt: No space left on device;"):
        LocalStorage(small_disk).put("a.pt", bytes(2 << 20))


def test_a_full_disk_leaves_the_object_before_whole(small_disk: Path) -> None:
    """Where the new bytes do not fit beside the old ones, the old ones stay, and no part of the new ones."""
    storage = LocalStorage(small_disk)
    storage.put("a.pt", b"o" * 700_000)
    with pytest.raises(StoreError):
        storage.put("a.pt", b"n" * 700_000)
    assert storage.get("a.pt") == b"o" * 700_000
    assert [path.name for path in small_disk.iterdir()] == ["a.pt"]


@pytest.mark.parametrize("doing", ["create", "names"])
def test_an_unknown_kind_of_url_is_told_once(doing: str) -> None:
    """A scheme that fsspec does not know is one line that names the option once and says what would do."""
    with pytest.raises(StoreError) as caught:
        getattr(open_storage("nowhere://bucket/run"), doing)()
    message = str(caught.value)
    assert "\n" not in message
    assert message.count("--snapshot_path nowhere://bucket/run:") == 1
    assert "use a directory or a URL that fsspec knows" in message


def test_a_missing_client_is_told_once_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """s3:// without s3fs is one line that names the option once and the extra to install."""
    monkeypatch.setitem(sys.modules, "s3fs", None)  # Python's own way to say that a module cannot be imported
    with pytest.raises(StoreError) as caught:
        open_storage("s3://bucket/run").names()
    message = str(caught.value)
    assert "\n" not in message
    assert message.count("--snapshot_path s3://bucket/run:") == 1
    assert "pip install 'elastic-mnist[s3]'" in message

"""Where snapshots are kept: what a local directory and fsspec's memory promise, and a directory beyond it."""

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from harness import eventually

from elastic_mnist.errors import StoreConflict, StoreError
from elastic_mnist.snapshots.storage import FsspecStorage, LocalStorage, Storage, local, open_storage

pytest.register_assert_rewrite("storage_contract")
from storage_contract import FencedContract, StorageContract  # noqa: E402 - after its asserts are to be rewritten


class HierarchyContract(StorageContract):
    """What a storage with directories promises beside."""

    def test_a_place_that_cannot_be_written_is_a_store_error_that_names_it(
        self, storage: Storage, location: str
    ) -> None:
        """Below an object there is no place: the error is one line, with option and location."""
        storage.put("taken", b"x")
        with pytest.raises(StoreError, match=f"^--snapshot_path {location}/taken: cannot write a.pt: .+$"):
            open_storage(f"{location}/taken").put("a.pt", b"x")


class TestLocal(FencedContract, HierarchyContract):
    """A directory keeps the contract."""

    @pytest.fixture
    def location(self, tmp_path: Path) -> str:
        """A directory whose parent is missing too."""
        return str(tmp_path / "some" / "where")


class TestMemory(HierarchyContract):
    """fsspec's memory file system keeps the contract, and stands for the object stores."""

    @pytest.fixture
    def location(self, tmp_path: Path) -> str:
        """A URL that no other test uses."""
        return f"memory://{tmp_path.name}-{uuid.uuid4().hex}/snapshots"

    def test_it_says_that_its_conditional_puts_are_not_atomic(self, storage: Storage) -> None:
        """Callers can tell."""
        assert not storage.has_conditional_put


def test_a_url_opens_an_object_store() -> None:
    """memory:// is no directory's name."""
    assert isinstance(open_storage("memory://snapshots"), FsspecStorage)


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
    monkeypatch.delitem(sys.modules, "elastic_mnist.snapshots.storage.s3", raising=False)
    monkeypatch.setitem(sys.modules, "s3fs", None)  # Python's own way to say that a module cannot be imported
    with pytest.raises(StoreError) as caught:
        open_storage("s3://bucket/run").names()
    message = str(caught.value)
    assert "\n" not in message
    assert message.count("--snapshot_path s3://bucket/run:") == 1
    assert "pip install 'elastic-mnist[s3]'" in message


def test_a_place_that_is_not_in_s3_costs_no_import_of_its_client() -> None:
    """A restart on a local path does not pay for s3fs."""
    code = (
        "import sys; from elastic_mnist.snapshots.storage import open_storage;"
        "open_storage('snapshots'); open_storage('memory://snapshots').names();"
        "sys.exit(bool({'s3fs', 'aiobotocore', 'botocore', 'aiohttp'} & {*sys.modules}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


COUNT = """
import sys
from storage_contract import count_to_ten
from elastic_mnist.snapshots.storage import open_storage
storage = open_storage(sys.argv[1])
for _ in range(10):
    count_to_ten(storage)
"""


def test_of_processes_that_add_to_an_object_none_is_lost(tmp_path: Path) -> None:
    """3 processes add 100 each: the count is exact, and the directory holds that object alone."""
    storage = LocalStorage(tmp_path)
    storage.put("run.json", b"0")
    command = [sys.executable, "-c", COUNT, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(subprocess.Popen(command, env=environment)) for _ in range(3)]
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert storage.get("run.json") == b"300"
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_conditional_put_waits_for_the_lock(tmp_path: Path) -> None:
    """While another one holds the directory's lock, nothing is written; once it is given up, the write is made."""
    storage = LocalStorage(tmp_path)
    with locked(tmp_path) as descriptor:
        writer = threading.Thread(target=storage.put_if_match, args=("a.pt", b"x", None))
        writer.start()
        eventually(lambda: list(tmp_path.iterdir()))  # it has come to its temporary file, and to the lock after that
        assert storage.names() == []
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        writer.join(30)
    assert storage.get("a.pt") == b"x"


def test_a_lock_that_is_never_given_up_is_a_store_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a stopped process keeps the lock, a writer is told after a while, with the way out; nothing is left."""
    monkeypatch.setattr(local, "LOCK_SECONDS", 0.2)
    with locked(tmp_path), pytest.raises(StoreError, match=f"^--snapshot_path {tmp_path}: .*locked.*lslocks.*$"):
        LocalStorage(tmp_path).put_if_match("a.pt", b"x", None)
    assert list(tmp_path.iterdir()) == []


def test_the_lock_is_given_up_although_a_fork_lives_on(tmp_path: Path) -> None:
    """A process that was forked in the middle of a conditional put keeps nobody out afterwards."""
    code = (
        "import os, sys; from pathlib import Path; from elastic_mnist.snapshots.storage import LocalStorage, local;"
        "storage = LocalStorage(Path(sys.argv[1]));"
        "fsync = os.fsync;"
        "os.fsync = lambda descriptor: (fsync(descriptor), os.fork() or os.read(0, 1) and os._exit(0));"
        "storage.put_if_match('a.pt', b'x', None);"
        "os.fsync = fsync; local.LOCK_SECONDS = 1;"
        "storage.put_if_match('b.pt', b'x', None)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as writer:
        assert writer.wait(60) == 0
        assert writer.stdin is not None
        writer.stdin.write(b"..")  # its forks were alive until here
    assert sorted(LocalStorage(tmp_path).names()) == ["a.pt", "b.pt"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF])
def test_without_locks_a_conditional_put_goes_on_and_says_so_once(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system without flock conditions still hold; the storage and one event say that it is not fenced."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    storage = LocalStorage(tmp_path)
    with structlog.testing.capture_logs() as events:
        etag = storage.put_if_match("a.pt", b"old", None)
        storage.put_if_match("a.pt", b"new", etag)
        with pytest.raises(StoreConflict):
            storage.put_if_match("a.pt", b"mine", etag)
    assert storage.get("a.pt") == b"new"
    assert not storage.has_conditional_put
    assert [(event["event"], event["log_level"]) for event in events] == [("store.not_fenced", "warning")]


def test_a_lock_that_cannot_be_had_for_another_reason_is_a_store_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the disk is not taken for a file system without locks."""

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(StoreError, match="Input/output error"):
        LocalStorage(tmp_path).put_if_match("a.pt", b"x", None)
    assert list(tmp_path.iterdir()) == []


def test_a_conflict_leaves_nothing_beside_the_object(tmp_path: Path) -> None:
    """The temporary file of a write that was refused is gone."""
    storage = LocalStorage(tmp_path)
    storage.put("a.pt", b"x")
    with pytest.raises(StoreConflict):
        storage.put_if_match("a.pt", b"y", None)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[int]:
    """Hold a directory's lock, as another process does in the middle of its write."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def test_what_is_no_file_is_told_and_not_waited_for(tmp_path: Path) -> None:
    """A pipe under an object's name is an error that names it, at once."""
    os.mkfifo(tmp_path / "a.pt")
    with pytest.raises(StoreError, match=r"cannot read a\.pt: not a regular file"):
        LocalStorage(tmp_path).get("a.pt")

"""Snapshots in a directory: atomic by `os.replace`, fenced by a lock on the directory itself."""

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from elastic_mnist.errors import StoreError
from elastic_mnist.snapshots.storage.base import Storage
from elastic_mnist.telemetry.events import log

LOCK_SECONDS: Final = 10.0
"""How long a writer waits for another's `put_if_match`, which takes milliseconds: longer, and that one is stopped."""

_LOCK_POLL_SECONDS: Final = 0.01

_LEFTOVER: Final = re.compile(r"\.(run\.json|step-\d{8,}\.(pt|json))\.[0-9a-f]+\.tmp")
"""The temporary files of interrupted writes; other hidden files are the user's."""

_NO_LOCKS: Final = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.EBADF}
"""What `flock` says on file systems without it; EBADF is NFS, which locks no directory exclusively."""


class LocalStorage(Storage):
    """A directory of a local file system.

    A write goes to a temporary file of the same directory, is synced, and takes its name by `os.replace`;
    the directory is synced last. The files have the mode that the user's umask says.
    """

    def __init__(self, directory: Path, named: str = "--snapshot_path") -> None:
        super().__init__(str(directory.absolute()), named)
        self._directory = directory.absolute()
        self._has_locks = True

    @property
    def has_conditional_put(self) -> bool:
        """True until the file system has shown that it has no locks."""
        return self._has_locks

    @property
    def can_read_back(self) -> bool:
        """False: the page cache would answer. What is synced without an error is believed."""
        return False

    def create(self) -> None:
        """Make the directory, and remove the temporary files of interrupted writes."""
        with self._access("create it"):
            self._directory.mkdir(parents=True, exist_ok=True)
            for path in self._directory.iterdir():
                if _LEFTOVER.fullmatch(path.name):
                    path.unlink(missing_ok=True)

    def names(self) -> list[str]:
        """List the directory; temporary files are not objects."""
        with self._access("list it", may_be_missing=True):
            try:
                with os.scandir(self._directory) as entries:
                    return [entry.name for entry in entries if not entry.name.startswith(".")]
            except FileNotFoundError:
                return []

    def get(self, name: str) -> bytes:
        """Read a file."""
        with self._access(f"read {name}", may_be_missing=True):
            descriptor = os.open(self._directory / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:  # noqa: PTH123 - of a descriptor
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # a pipe would keep its reader waiting for ever
                    raise OSError(errno.EINVAL, "not a regular file")
                return file.read()

    def put(self, name: str, data: bytes) -> None:
        """Write, sync, rename, sync."""
        with self._access(f"write {name}"), self._written(name, data) as temporary, self._opened() as descriptor:
            temporary.replace(self._directory / name)
            os.fsync(descriptor)

    def etag(self, name: str) -> str | None:
        """Return inode, time and size, which `os.replace` gives anew."""
        with self._access(f"read {name}"):
            try:
                return _etag_of(self._directory / name)
            except FileNotFoundError:
                return None

    def put_if_match(self, name: str, data: bytes, etag: str | None) -> str:
        """Write and sync; then, under the directory's lock, compare, rename, sync."""
        with self._access(f"write {name}"), self._written(name, data) as temporary, self._opened() as descriptor:
            new_etag = _etag_of(temporary)
            with self._locked(descriptor, name):
                if self.etag(name) != etag:
                    raise self._conflict(name)
                temporary.replace(self._directory / name)
                os.fsync(descriptor)
            return new_etag

    def delete(self, name: str) -> None:
        """Remove a file."""
        with self._access(f"remove {name}"):
            (self._directory / name).unlink(missing_ok=True)

    def rename(self, name: str, new_name: str) -> None:
        """Rename a file."""
        with self._access(f"rename {name}", may_be_missing=True):
            (self._directory / name).replace(self._directory / new_name)

    @contextlib.contextmanager
    def _written(self, name: str, data: bytes) -> Iterator[Path]:
        """Write and sync a temporary file, which is gone afterwards.

        Its name is random: process ids are not unique among the hosts of a shared directory.
        """
        self._directory.mkdir(parents=True, exist_ok=True)  # also where somebody has removed it meanwhile
        temporary = self._directory / f".{name}.{os.urandom(8).hex()}.tmp"
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """Open the directory itself, to sync and to lock it."""
        descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _locked(self, descriptor: int, name: str) -> Iterator[None]:
        """Keep other writers of `put_if_match` out, on this host and where the file system says so on others.

        The kernel gives the lock up with its process; there is no lock file to be left behind.
        """
        deadline = time.monotonic() + LOCK_SECONDS
        while not self._lock(descriptor):
            if time.monotonic() > deadline:
                raise StoreError(
                    f"{self._named}: cannot write {name}: another process has kept the directory locked for "
                    f"{LOCK_SECONDS:g} s, as a stopped one does; `lslocks` names it: end it, or choose another"
                )
            time.sleep(_LOCK_POLL_SECONDS)
        try:
            yield
        finally:
            if self._has_locks:  # said, since a process forked meanwhile would keep it with the descriptor
                fcntl.flock(descriptor, fcntl.LOCK_UN)

    def _lock(self, descriptor: int) -> bool:
        """Try to take the lock; true where there are none to take."""
        if not self._has_locks:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self._has_locks = False
            log.warning("store.not_fenced", path=self.location, reason=f"no locks here: {error.strerror}")
        return True


def _etag_of(path: Path) -> str:
    """Return the etag of a file, by its descriptor: opening it makes NFS ask the server."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        found = os.fstat(descriptor)
        return f"{found.st_ino}-{found.st_mtime_ns}-{found.st_size}"
    finally:
        os.close(descriptor)

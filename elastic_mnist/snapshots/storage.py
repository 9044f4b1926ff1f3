"""The one seam to where snapshots are kept: named objects in one directory or under one URL.

Invariant: `put` is atomic. Whoever reads an object gets the old bytes or the new ones, whole, also after a
kill or a loss of power in the middle of it.

An object that is not there is `FileNotFoundError`. Any other error of access is a `StoreError`: it must
never be read as "there is no snapshot".
"""

import contextlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import fsspec

from elastic_mnist.errors import StoreError
from elastic_mnist.settings import local_path

_LEFTOVER: Final = re.compile(r"\.(run\.json|step-\d{8,}\.(pt|json))\.\d+\.tmp")
"""The temporary files of interrupted writes; other hidden files are the user's."""


class Storage(ABC):
    """Named objects in one place.

    Args:
        location: the directory or URL, as people know it.
        named: what names it to the user, an option for instance; stands in every error.
    """

    def __init__(self, location: str, named: str) -> None:
        self.location = location
        self._named = f"{named} {location}"

    @abstractmethod
    def create(self) -> None:
        """Make the place if it is missing, and remove what interrupted writes have left."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all objects, read past any cache; empty where the place is missing."""

    @abstractmethod
    def get(self, name: str) -> bytes:
        """Return an object's bytes."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Write an object, atomically."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove an object; one that is not there is fine."""

    @abstractmethod
    def rename(self, name: str, new_name: str) -> None:
        """Give an object another name; not atomic everywhere, so never part of a commit."""

    def path(self, name: str) -> str:
        """Return where an object is, for people and for `--resume_from`."""
        return f"{self.location.rstrip('/')}/{name}"

    @contextlib.contextmanager
    def _access(self, doing: str, *, may_be_missing: bool = False) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except Exception as error:  # a backend may raise anything of its own; all of it means "no access"
            if may_be_missing and isinstance(error, FileNotFoundError):
                raise
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise StoreError(
                f"{self._named}: cannot {doing}: {reason}; make it accessible or choose another"
            ) from error


def open_storage(location: str, *, named: str = "--snapshot_path") -> Storage:
    """Return the storage at a directory or fsspec URL; touches nothing yet."""
    directory = local_path(location)
    return ObjectStorage(location, named) if directory is None else LocalStorage(directory, named)


class LocalStorage(Storage):
    """A directory of a local file system.

    A write goes to a temporary file of the same directory, is synced, and takes its name by `os.replace`;
    the directory is synced last. The files have the mode that the user's umask says.
    """

    def __init__(self, directory: Path, named: str = "--snapshot_path") -> None:
        super().__init__(str(directory.absolute()), named)
        self._directory = directory.absolute()

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
                return [entry.name for entry in os.scandir(self._directory) if not entry.name.startswith(".")]
            except FileNotFoundError:
                return []

    def get(self, name: str) -> bytes:
        """Read a file."""
        with self._access(f"read {name}", may_be_missing=True):
            return (self._directory / name).read_bytes()

    def put(self, name: str, data: bytes) -> None:
        """Write, sync, rename, sync."""
        temporary = self._directory / f".{name}.{os.getpid()}.tmp"
        with self._access(f"write {name}"):
            self._directory.mkdir(parents=True, exist_ok=True)  # also where somebody has removed it meanwhile
            try:
                with temporary.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(self._directory / name)
                self._sync_directory()
            finally:
                temporary.unlink(missing_ok=True)

    def delete(self, name: str) -> None:
        """Remove a file."""
        with self._access(f"remove {name}"):
            (self._directory / name).unlink(missing_ok=True)

    def rename(self, name: str, new_name: str) -> None:
        """Rename a file."""
        with self._access(f"rename {name}", may_be_missing=True):
            (self._directory / name).replace(self._directory / new_name)

    def _sync_directory(self) -> None:
        descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class ObjectStorage(Storage):
    """Any other file system of fsspec. A put is one call with the whole object, from memory."""

    def __init__(self, location: str, named: str = "--snapshot_path") -> None:
        super().__init__(location, named)
        self._opened: tuple[Any, str] | None = None

    def _open(self) -> tuple[Any, str]:
        if self._opened is None:
            try:
                self._opened = fsspec.core.url_to_fs(self.location, use_listings_cache=False)
            except ImportError as error:
                raise StoreError(
                    f"{self._named}: {error}; install what it names, for s3:// with pip install 'elastic-mnist[s3]'"
                ) from error
            except ValueError as error:
                known = re.sub(r"\s+", " ", str(error))
                raise StoreError(f"{self._named}: {known}; use a directory or a URL that fsspec knows") from error
        return self._opened

    def create(self) -> None:
        """Make the directory where the store has such things."""
        with self._access("create it"):
            filesystem, root = self._open()
            filesystem.makedirs(root, exist_ok=True)

    def names(self) -> list[str]:
        """List the objects, past fsspec's cache."""
        with self._access("list it", may_be_missing=True):
            filesystem, root = self._open()
            try:
                filesystem.invalidate_cache()
                return [path.rsplit("/", 1)[-1] for path in filesystem.ls(root, detail=False)]
            except FileNotFoundError:
                return []

    def get(self, name: str) -> bytes:
        """Fetch an object."""
        with self._access(f"read {name}", may_be_missing=True):
            filesystem, root = self._open()
            data: bytes = filesystem.cat_file(f"{root}/{name}")
            return data

    def put(self, name: str, data: bytes) -> None:
        """Send an object in one call."""
        with self._access(f"write {name}"):
            filesystem, root = self._open()
            filesystem.pipe_file(f"{root}/{name}", data)

    def delete(self, name: str) -> None:
        """Remove an object."""
        with contextlib.suppress(FileNotFoundError), self._access(f"remove {name}", may_be_missing=True):
            filesystem, root = self._open()
            filesystem.rm_file(f"{root}/{name}")

    def rename(self, name: str, new_name: str) -> None:
        """Copy, then remove."""
        with self._access(f"rename {name}", may_be_missing=True):
            filesystem, root = self._open()
            filesystem.mv(f"{root}/{name}", f"{root}/{new_name}")

"""Snapshots in any file system of fsspec."""

import contextlib
import os
import re
from typing import Any

import fsspec

from elastic_mnist.errors import StoreError
from elastic_mnist.snapshots.storage.base import Storage


class FsspecStorage(Storage):
    """Objects under a URL of fsspec. A put is one call with the whole object, from memory."""

    def __init__(self, location: str, named: str = "--snapshot_path") -> None:
        super().__init__(location, named)
        self._opened: tuple[int, Any, str] | None = None

    @property
    def outlives_process(self) -> bool:
        """False for fsspec's `memory://`."""
        return not self.location.startswith("memory:")

    def _open(self) -> tuple[Any, str]:
        """Return fsspec's file system and the place's path in it; a forked process opens its own."""
        if self._opened is None or self._opened[0] != os.getpid():
            try:
                filesystem, root = fsspec.core.url_to_fs(self.location, **self._options())
            except ImportError as error:
                raise StoreError(
                    f"{self._named}: {error}; install what it names, for s3:// with pip install 'elastic-mnist[s3]'"
                ) from error
            except ValueError as error:
                known = re.sub(r"\s+", " ", str(error))
                raise StoreError(f"{self._named}: {known}; use a directory or a URL that fsspec knows") from error
            self._opened = os.getpid(), filesystem, root.rstrip("/")
        return self._opened[1:]

    def _options(self) -> dict[str, Any]:
        """Return fsspec's options for this place, on top of the user's configuration."""
        return {"use_listings_cache": False}

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

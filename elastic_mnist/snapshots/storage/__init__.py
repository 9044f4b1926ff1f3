"""The one seam to where snapshots are kept: named objects in one directory or under one URL.

`base` says what every store promises; `local` keeps it in a directory, `s3` in a bucket, `objects` in any other
file system that fsspec knows.
"""

import re

from elastic_mnist.errors import StoreError
from elastic_mnist.settings import local_path
from elastic_mnist.snapshots.storage.base import Storage
from elastic_mnist.snapshots.storage.fsspec_storage import FsspecStorage
from elastic_mnist.snapshots.storage.local import LocalStorage

__all__ = ["FsspecStorage", "LocalStorage", "Storage", "open_storage"]


def open_storage(location: str, *, named: str = "--snapshot_path") -> Storage:
    """Return the storage at a directory or fsspec URL; touches nothing yet."""
    directory = local_path(location)
    if directory is not None:
        return LocalStorage(directory, named)
    if not re.match("s3a?://", location):
        return FsspecStorage(location, named)
    try:
        from elastic_mnist.snapshots.storage.s3 import S3Storage  # noqa: PLC0415 - what it imports takes a second
    except ImportError as error:
        raise StoreError(
            f"{named} {location}: {error}; install what s3:// needs with pip install 'elastic-mnist[s3]'"
        ) from error
    return S3Storage(location, named)

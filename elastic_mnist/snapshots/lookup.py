"""What a user names on a command line: a snapshot file, or the newest valid one at a place."""

import re
import stat
from dataclasses import replace
from typing import Literal, overload

from elastic_mnist.errors import SnapshotError, StoreError, UsageError
from elastic_mnist.settings import local_path
from elastic_mnist.snapshots import importers
from elastic_mnist.snapshots.durable import DurableTier, Snapshot
from elastic_mnist.snapshots.importers import ForeignFile
from elastic_mnist.snapshots.manifest import DATA_NAME, Manifest
from elastic_mnist.snapshots.state import checked, is_own, read_plain
from elastic_mnist.snapshots.storage import Storage, open_storage


def _copy(path: str, data: bytes, *, allow_foreign: bool) -> Snapshot | ForeignFile:
    """Return what a file alone holds."""
    try:
        content = read_plain(data)
        if allow_foreign and not is_own(content):
            return ForeignFile(path=path, size_bytes=len(data), foreign=importers.of(content))
        return Snapshot(path=path, data=data, state=checked(content), manifest=None)
    except StoreError as error:
        raise StoreError(f"{path}: {error}") from error


def locate(location: str, *, named: str) -> tuple[Storage, str | None]:
    """Return the place that a user means, and the name of the file there; None where the place itself is meant.

    Of a URL, and of a path where nothing is, the last part is a file's name where it has a suffix and no slash follows.
    """
    has_suffix = re.search(r"[^/]\.[A-Za-z]\w*$", location) is not None
    path = local_path(location)
    if path is not None:
        try:
            mode = path.stat().st_mode
        except (OSError, ValueError):  # whoever reads there tells why it cannot be
            mode = 0
        if mode and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a pipe, which may never end
            raise UsageError(f"{named} {location}: neither a file nor a directory; name another")
        if stat.S_ISREG(mode) or (has_suffix and not mode):
            return open_storage(str(path.parent), named=named), path.name
    elif has_suffix and location.count("/") > 2:  # noqa: PLR2004 - those of the scheme, and one before the name
        parent, _, name = location.rpartition("/")
        return open_storage(parent, named=named), name
    return open_storage(location, named=named), None


def manifest_beside(storage: Storage, name: str) -> Manifest | None:
    """Return the manifest of a data file, None where the name or the place has none; raises `SnapshotError`."""
    if not DATA_NAME.fullmatch(name):
        return None
    manifest_name = name.removesuffix(".pt") + ".json"
    try:
        return Manifest.from_json(storage.get(manifest_name), manifest_name)
    except FileNotFoundError:
        return None


@overload
def find(location: str, *, named: str) -> Snapshot: ...


@overload
def find(location: str, *, named: str, allow_foreign: Literal[True]) -> Snapshot | ForeignFile: ...


def find(location: str, *, named: str, allow_foreign: bool = False) -> Snapshot | ForeignFile:
    """Return the snapshot that a user names: a file, or the newest valid one at a place.

    A file is checked against its manifest where that lies beside it; of a copy of the file alone, its format is all
    there is to check. Nothing is changed there.

    Args:
        location: file, directory or URL; see `locate`.
        named: what names it to the user; stands in every error.
        allow_foreign: whether a file may be another program's (see `foreign`); at a place, ours alone are looked for.

    Raises:
        SnapshotError: what is there is damaged, or does not fit.
        UsageError: nothing is there, or it cannot be accessed.
    """
    storage, name = locate(location, named=named)
    tier = DurableTier(storage, read_only=True)
    if name is None:
        newest = tier.newest_valid()
        if newest is not None:
            return replace(newest, num_damaged_newer=tier.num_rejected)
        if tier.num_rejected:
            raise SnapshotError(f"{named} {location}: all of the {tier.num_rejected} snapshots there are damaged")
        raise UsageError(f"{named} {location}: no snapshot there; name another")
    try:
        manifest = manifest_beside(storage, name)
        if manifest is not None:
            return tier.load(manifest)
        return _copy(storage.path(name), storage.get(name), allow_foreign=allow_foreign)
    except FileNotFoundError:
        hint = "" if local_path(location) else ", or end a place's with a slash"
        raise UsageError(f"{named} {location}: no such file; name another{hint}") from None
    except SnapshotError as error:
        raise SnapshotError(f"{named} {location}: {error}") from None

"""`elastic-mnist export SNAPSHOT FILE`: the weights alone, for any script that has the network.

What is written is a plain `state_dict`, fp32 on the CPU, under the keys of the model: `torch.load(FILE,
weights_only=True)` reads it without this package. The same weights give the same bytes.

Invariant: FILE is whole or not there, and nothing that was there is replaced unless that is asked for.
"""

from pathlib import Path

from torch import Tensor

from elastic_mnist.errors import SnapshotError, StoreConflict, UsageError
from elastic_mnist.settings import local_path
from elastic_mnist.snapshots import importers
from elastic_mnist.snapshots.durable import Snapshot
from elastic_mnist.snapshots.importers import ForeignFile
from elastic_mnist.snapshots.lookup import find
from elastic_mnist.snapshots.state import dump_plain
from elastic_mnist.snapshots.storage import Storage, open_storage
from elastic_mnist.training.model import weights_sha256


def run(snapshot: str, file: str, *, force: bool) -> int:
    """Write the file and say what it holds; return 0, or 1 where the snapshot is damaged or does not fit."""
    storage, name = _target(file)
    if not force and storage.etag(name) is not None:
        raise _in_the_way(file)
    try:
        found = find(snapshot, named="snapshot", allow_foreign=True)
        weights, origin = _weights_of(found)
    except SnapshotError as error:
        print(f"damaged   {error}")  # noqa: T201 - printing is what a tool does
        return 1
    data = dump_plain(weights)
    if force:
        storage.put(name, data)
    else:
        try:
            storage.put_if_match(name, data, None)
        except StoreConflict:
            raise _in_the_way(file) from None
    print(f"exported  {storage.path(name)}")  # noqa: T201
    for line in origin:
        print(f"          {line}")  # noqa: T201
    print(f"          weights_sha256 {weights_sha256(weights)}")  # noqa: T201
    return 0


def _target(file: str) -> tuple[Storage, str]:
    """Return where to write, under which name."""
    path = local_path(file)
    if path is None:
        parent, _, name = file.rpartition("/")
        storage = open_storage(parent, named="FILE")
    else:
        _check_path(file, path)
        storage, name = open_storage(str(path.parent), named="FILE"), path.name
    if not name or file.endswith("/"):
        raise UsageError(f"FILE {file}: names no file; add a name, weights.pt for instance")
    return storage, name


def _check_path(file: str, path: Path) -> None:
    try:
        if path.is_dir():
            raise UsageError(f"FILE {file}: is a directory; name a file in it")
        if path.exists() and not path.is_file():
            raise UsageError(f"FILE {file}: is a device or a pipe, not a file; name another")
        if not path.parent.is_dir():
            raise UsageError(f"FILE {file}: {path.parent} is no directory; make it first, or name another")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"FILE {file}: {reason}; name another") from None


def _in_the_way(file: str) -> UsageError:
    return UsageError(f"FILE {file}: is there already; name another, or replace it with --force")


def _weights_of(found: Snapshot | ForeignFile) -> tuple[dict[str, Tensor], list[str]]:
    """Return a snapshot's weights, checked against the network, and where they come from, a text each."""
    if isinstance(found, ForeignFile):
        return found.foreign.model, [f"from {found.path}, a {found.foreign.kind}"]
    state, notes = found.state, list[str]()
    try:
        weights = importers.weights(state["model"], notes)
    except SnapshotError as error:
        raise SnapshotError(f"{found.path}: {error}") from None
    origin = [f"from {found.path}", f"step {state['step']}, epoch {state['epoch']}, run {state['run_id']}", *notes]
    if found.num_damaged_newer:
        origin.append(f"newer ones there that are damaged: {found.num_damaged_newer}")
    return weights, origin

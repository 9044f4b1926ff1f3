"""The durable tier: `step-00000590.pt`, and its manifest `step-00000590.json`.

Invariant: the manifest is the commit. It is written last, after the data is safe, and holds the data's
size and SHA-256, and its own. What has no valid manifest does not exist; what does not match its manifest
is never loaded, but set aside and named.

Where another state of the same step is committed already, as when a job was stopped before it could evaluate an epoch,
the manifest goes first and is true of either one: at no moment is there none.

Global rank 0 alone writes, and decides what to believe; see `resume` for how the others agree.
"""

import hashlib
import json
import re
import stat
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, Literal, overload

from elastic_mnist.errors import SnapshotError, StoreConflict, StoreError, TrainingError, UsageError
from elastic_mnist.settings import local_path
from elastic_mnist.snapshots import importers
from elastic_mnist.snapshots.importers import ForeignFile
from elastic_mnist.snapshots.run_config import fingerprint
from elastic_mnist.snapshots.state import State, checked, is_own, pack, position_of, read_plain, unpack
from elastic_mnist.snapshots.storage import Storage, open_storage
from elastic_mnist.telemetry.events import log
from elastic_mnist.training.model import weights_sha256
from elastic_mnist.training.sampler import Position

_MANIFEST_NAME: Final = re.compile(r"step-(\d{8,})\.json")
_DATA_NAME: Final = re.compile(r"step-(\d{8,})\.pt")
_ASIDE: Final = ".rejected"
_NUM_ATTEMPTS: Final = 3


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What is known of a snapshot without opening it.

    Attributes:
        step, epoch, samples_in_epoch: what is finished; see `Position`.
        size_bytes, sha256: of the data file.
        weights_sha256: of the model's weights, as the event `run.finished` gives it.
        settings_fingerprint: of the settings that the result hangs on.
        run_id, generation: who wrote it.
        created_at: seconds since the epoch of UTC.
        test_accuracy: of the last evaluation before it; None before the first.
        replaces: the one that was committed under the same name before; its data may be there still.
    """

    step: int
    epoch: int
    samples_in_epoch: int
    size_bytes: int
    sha256: str
    weights_sha256: str
    settings_fingerprint: str
    run_id: str
    generation: int
    created_at: float
    test_accuracy: float | None
    replaces: "Manifest | None" = None

    @property
    def position(self) -> Position:
        """What is finished."""
        return Position(epoch=self.epoch, samples_in_epoch=self.samples_in_epoch, step=self.step)

    @property
    def data_name(self) -> str:
        """The name of the data file."""
        return _data_name(self.step)

    @property
    def name(self) -> str:
        """The name of the manifest itself."""
        return f"step-{self.step:08d}.json"

    def to_json(self) -> bytes:
        """Serialise, with a digest of the content in `manifest_sha256`."""
        content = self._to_plain()
        return json.dumps({**content, "manifest_sha256": _digest_of(content)}, indent=1).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes, name: str) -> "Manifest":
        """Read a manifest that lies under `name`; raises `SnapshotError` unless every byte is as written."""
        try:
            content = json.loads(data)
            digest = content.pop("manifest_sha256")
            manifest = cls._from_plain(content)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SnapshotError(f"manifest not readable: {type(error).__name__}: {error}") from None
        # Byte for byte, so that no flipped bit can hide in white space or in a number's spelling.
        if digest != _digest_of(content) or manifest.to_json() != data:
            raise SnapshotError("manifest does not match its own SHA-256")
        if manifest.name != name:
            raise SnapshotError(f"manifest is that of step {manifest.step}")
        return manifest

    def _to_plain(self) -> dict[str, Any]:
        """Return JSON-ready values; what is replaced only where there is such a one."""
        content = asdict(self)
        if content["replaces"] is None:
            del content["replaces"]
        else:
            del content["replaces"]["replaces"]
        return content

    @classmethod
    def _from_plain(cls, content: dict[str, Any]) -> "Manifest":
        """Read what `_to_plain` returned; raises `KeyError` or `TypeError` for anything else."""
        before = content.get("replaces")
        facts = {field.name: content[field.name] for field in fields(cls) if field.name != "replaces"}
        return cls(**facts, replaces=None if before is None else cls._from_plain(before))


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A snapshot that has been read and found whole.

    Attributes:
        path: where it is.
        data: its bytes.
        state: what they hold.
        manifest: what is known of it; None for a copy of the file alone.
        num_damaged_newer: snapshots at the same place that are newer, and damaged.
    """

    path: str
    data: bytes
    state: State
    manifest: Manifest | None
    num_damaged_newer: int = 0


class DurableTier:
    """The durable snapshots at one place.

    Args:
        storage: the place.
        keep_last: number of snapshots that retention leaves; None for all.
        read_only: whether the place is another run's, where damaged snapshots are told but left as they are.
    """

    def __init__(self, storage: Storage, *, keep_last: int | None = 1, read_only: bool = False) -> None:
        self._storage = storage
        self._read_only = read_only
        self._keep_last = keep_last
        self.num_rejected = 0

    def save(self, data: bytes, manifest: Manifest, check_claim: Callable[[], None] = lambda: None) -> None:
        """Commit a snapshot, read it back, then remove the oldest ones beyond `keep_last`.

        Args:
            data: the bytes that the manifest is of.
            manifest: commits them.
            check_claim: raises where this process may no longer write here; called before each write.

        Raises:
            StoreError: it could not be written, or does not read back; what was there before still is.
            Exception: what `check_claim` raises.
        """
        began = time.monotonic()
        assert len(data) == manifest.size_bytes
        check_claim()
        there = self._committed(manifest.name)
        if there is None:
            self._put(manifest.data_name, data, check_claim)
            self._put(manifest.name, manifest.to_json(), check_claim)
        elif not _is_same(there, manifest):
            self._put(manifest.name, replace(manifest, replaces=there).to_json(), check_claim)
            self._put(manifest.data_name, data, check_claim)
        log.info(
            "snapshot.saved",
            tier="storage",
            step=manifest.step,
            epoch=manifest.epoch,
            path=self._storage.path(manifest.data_name),
            size_bytes=manifest.size_bytes,
            save_seconds=round(time.monotonic() - began, 4),
        )
        try:
            if self._keep_last is not None:
                self._prune(manifest.step, self._keep_last)
        except StoreError as error:  # the snapshot is committed; the old ones cost space only
            log.warning("snapshot.prune_failed", reason=str(error))

    def save_state(self, state: State, check_claim: Callable[[], None]) -> None:
        """Commit a state as a snapshot.

        Raises:
            TrainingError: its weights are not finite.
            Exception: what `save` raises.
        """
        if not all(tensor.isfinite().all() for tensor in state["model"].values()):
            raise TrainingError(f"step {state['step']}: the weights are not finite; nothing of it was saved")
        data = pack(state)
        manifest = Manifest(
            **vars(position_of(state)),
            size_bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            weights_sha256=weights_sha256(state["model"]),
            settings_fingerprint=fingerprint(state["contract"]),
            run_id=state["run_id"],
            generation=state["generation"],
            created_at=time.time(),
            test_accuracy=state["progress"]["test_accuracy"],
        )
        self.save(data, manifest, check_claim)

    def _committed(self, manifest_name: str) -> Manifest | None:
        """Return what is known of the snapshot that is committed under a name; None where there is none.

        One that is not to be believed is taken out of the way.
        """
        try:
            return self.load(Manifest.from_json(self._storage.get(manifest_name), manifest_name)).manifest
        except FileNotFoundError:
            return None
        except SnapshotError as error:
            self._reject(manifest_name, str(error))
            return None

    def _put(self, name: str, data: bytes, check_claim: Callable[[], None]) -> None:
        """Write what nobody has written meanwhile, and believe it once it reads back: retention relies on it.

        Whoever had a claim here and lost it can still be about to write. It has seen the version before ours, or none,
        and fails; if it was faster, we fail, and see that the claim is ours.
        """
        for attempt in range(_NUM_ATTEMPTS):
            version = self._storage.version(name)
            check_claim()
            try:
                self._storage.put_if(name, data, version)
                break
            except StoreConflict:
                if attempt == _NUM_ATTEMPTS - 1:
                    raise
        try:
            is_whole = self._storage.get(name) == data
        except FileNotFoundError:
            is_whole = False
        if not is_whole:
            raise StoreError(f"{self._storage.path(name)}: does not read back as it was written; check the store")

    def manifests(self, is_late: Callable[[Manifest], bool] = lambda _: False) -> list[Manifest]:
        """Return the valid manifests, the largest step first; invalid ones, and late ones, are told and set aside."""
        found = []
        for name in self._storage.names():
            if _MANIFEST_NAME.fullmatch(name):
                try:
                    manifest = Manifest.from_json(self._storage.get(name), name)
                except FileNotFoundError:
                    continue  # removed by retention meanwhile
                except SnapshotError as error:
                    self._reject(name, str(error))
                    continue
                if is_late(manifest):
                    self._reject(name, f"generation {manifest.generation} saved it when a later one had gone on")
                else:
                    found.append(manifest)
        return sorted(found, key=lambda manifest: manifest.step, reverse=True)

    def load(self, manifest: Manifest) -> Snapshot:
        """Return a snapshot, checked against its manifest.

        Raises:
            SnapshotError: it is damaged.
            StoreError: it cannot be had, or not be read here, whole as it is.
        """
        path = self._storage.path(manifest.data_name)
        try:
            data = self._storage.get(manifest.data_name)
        except FileNotFoundError:
            raise SnapshotError(f"{manifest.data_name} is missing") from None
        known = _manifest_of(data, manifest)
        try:
            state = unpack(data)
        except (SnapshotError, StoreError) as error:  # it is as it was written: whatever is wrong, it is no damage
            raise StoreError(f"{path}: whole, as its SHA-256 says, but {error}") from error
        if position_of(state) != known.position:
            raise SnapshotError("its position is not its manifest's")
        return Snapshot(path=path, data=data, state=state, manifest=known)

    def newest_valid(
        self, *, after: int = -1, is_late: Callable[[Manifest], bool] = lambda _: False
    ) -> Snapshot | None:
        """Return the newest snapshot of a step beyond `after` that is whole; damaged newer ones are set aside.

        So are those that are late: written by a generation that was over before it knew.
        """
        for manifest in self.manifests(is_late):
            if manifest.step <= after:
                break
            try:
                return self._load_as_it_is(manifest)
            except SnapshotError as error:
                self._reject(manifest.name, str(error))
        return None

    def _load_as_it_is(self, manifest: Manifest) -> Snapshot:
        """Load a snapshot; where that fails because it was replaced meanwhile, load what is there now."""
        try:
            return self.load(manifest)
        except SnapshotError:
            try:
                current = Manifest.from_json(self._storage.get(manifest.name), manifest.name)
            except (FileNotFoundError, SnapshotError):
                current = manifest
            if current == manifest:
                raise
        return self._load_as_it_is(current)

    @property
    def location(self) -> str:
        """The place, as people know it."""
        return self._storage.location

    def names(self) -> list[str]:
        """Return the names of what is there."""
        return self._storage.names()

    def path(self, step: int) -> str:
        """Return where the snapshot of a step is."""
        return self._storage.path(_data_name(step))

    def _reject(self, manifest_name: str, reason: str) -> None:
        """Tell of a snapshot that is not to be believed, and take it out of the way.

        The manifest goes first: without it the snapshot does not exist.
        """
        self.num_rejected += 1
        data_name = manifest_name.replace(".json", ".pt")
        log.warning("snapshot.rejected", path=self._storage.path(data_name), reason=reason)
        for name in () if self._read_only else (manifest_name, data_name):
            try:
                self._storage.rename(name, name + _ASIDE)
            except (FileNotFoundError, StoreError):
                continue  # a read-only store is no reason not to take the snapshot before

    def _prune(self, saved_step: int, keep_last: int) -> None:
        """Remove the snapshots beyond `keep_last`, and data that never got its manifest.

        What lies beyond the step just saved was found damaged and could not be set aside: it counts for nothing
        here, or it would push out what is whole. So does a manifest without data: a generation that was over before it
        knew may have left one.
        """
        names = self._storage.names()
        manifests, data = (
            sorted(step for match in map(pattern.fullmatch, names) if match and (step := int(match[1])) <= saved_step)
            for pattern in (_MANIFEST_NAME, _DATA_NAME)
        )
        kept = {*[step for step in manifests if step in {*data}][-keep_last:]}
        for step in manifests:
            if step not in kept:
                self._storage.delete(f"step-{step:08d}.json")
        for step in data:
            if step not in kept:
                self._storage.delete(_data_name(step))


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
    if not _DATA_NAME.fullmatch(name):
        return None
    manifest_name = name.removesuffix(".pt") + ".json"
    try:
        return Manifest.from_json(storage.get(manifest_name), manifest_name)
    except FileNotFoundError:
        return None


def _manifest_of(data: bytes, manifest: Manifest) -> Manifest:
    """Return the manifest that some data is of: the one beside it, or the one that this replaces."""
    digest = hashlib.sha256(data).hexdigest()
    for known in filter(None, (manifest, manifest.replaces)):
        if (len(data), digest) == (known.size_bytes, known.sha256):
            return replace(known, replaces=None)
    if len(data) != manifest.size_bytes:
        raise SnapshotError(f"{len(data):,} bytes, its manifest says {manifest.size_bytes:,}")
    raise SnapshotError("its SHA-256 is not its manifest's")


def _is_same(there: Manifest, manifest: Manifest) -> bool:
    """Whether two manifests are of one state, which this generation has written twice: its first try was not lost."""
    return replace(there, size_bytes=manifest.size_bytes, sha256=manifest.sha256, created_at=manifest.created_at) == (
        manifest
    )


def _digest_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _data_name(step: int) -> str:
    return f"step-{step:08d}.pt"

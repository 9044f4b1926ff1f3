"""The durable tier: `step-00000590.pt`, and its manifest `step-00000590.json`.

Invariant: the manifest is the commit. It is written last, after the data is safe, and holds the size and SHA-256 of the
data, and its own SHA-256. What has no valid manifest does not exist; what does not match its manifest is never loaded,
but set aside and logged.

Where another state of the same step is committed already, as after a stop between an epoch's last step and its
evaluation, the manifest is written first and describes both states: at no moment is there none. The names of the files
are fixed, and no store replaces two objects at once, so one object must be true before and after the other changes.

Global rank 0 alone writes, and decides which snapshot to load; see `resume` for how the others agree.
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from elastic_mnist.errors import SnapshotError, StoreConflict, StoreError, TrainingError
from elastic_mnist.snapshots.manifest import DATA_NAME, MANIFEST_NAME, Manifest, data_name
from elastic_mnist.snapshots.run_config import fingerprint
from elastic_mnist.snapshots.state import State, pack, position_of, unpack
from elastic_mnist.snapshots.storage import Storage
from elastic_mnist.telemetry.events import log
from elastic_mnist.training.model import weights_sha256

_ASIDE: Final = ".rejected"
_NUM_ATTEMPTS: Final = 3


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A snapshot that was read and is whole.

    Attributes:
        path: where it is.
        data: its bytes.
        state: what they hold.
        manifest: None for a copy of the data file alone.
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
        read_only: whether the place is another run's, where damaged snapshots are logged and left as they are.
    """

    def __init__(self, storage: Storage, *, keep_last: int | None = 1, read_only: bool = False) -> None:
        self._storage = storage
        self._read_only = read_only
        self._keep_last = keep_last
        self.num_rejected = 0

    def save(self, data: bytes, manifest: Manifest, check_lease: Callable[[], None] = lambda: None) -> None:
        """Commit a snapshot, then remove the oldest ones beyond `keep_last`.

        Args:
            data: the bytes of the snapshot.
            manifest: of these bytes.
            check_lease: raises where this process may no longer write here; called before each write.

        Raises:
            StoreError: it could not be written, or does not read back; what was there before is unchanged.
            Exception: what `check_lease` raises.
        """
        began = time.monotonic()
        assert len(data) == manifest.size_bytes
        check_lease()
        there = self._committed(manifest.name)
        if there is None:
            self._put(manifest.data_name, data, check_lease)
            self._put(manifest.name, manifest.to_json(), check_lease)
        elif not manifest.is_of_same_state(there):
            self._put(manifest.name, replace(manifest, replaces=there).to_json(), check_lease)
            self._put(manifest.data_name, data, check_lease)
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

    def save_state(self, state: State, check_lease: Callable[[], None]) -> None:
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
        self.save(data, manifest, check_lease)

    def _committed(self, manifest_name: str) -> Manifest | None:
        """Return the manifest of the snapshot that is committed under a name; None where there is none.

        One that is damaged is set aside.
        """
        try:
            return self.load(Manifest.from_json(self._storage.get(manifest_name), manifest_name)).manifest
        except FileNotFoundError:
            return None
        except SnapshotError as error:
            self._reject(manifest_name, str(error))
            return None

    def _put(self, name: str, data: bytes, check_lease: Callable[[], None]) -> None:
        """Write an object that no other has written meanwhile, and read it back where that proves anything.

        A generation that has lost the lease may still be about to write. It has seen an older object, or none, and
        fails; if it was faster, this one fails, checks its lease and writes again.
        """
        for attempt in range(_NUM_ATTEMPTS):
            etag = self._storage.etag(name)
            check_lease()
            try:
                self._storage.put_if_match(name, data, etag)
                break
            except StoreConflict:
                if attempt == _NUM_ATTEMPTS - 1:
                    raise
        if self._storage.can_read_back and not self._reads_back(name, data):
            raise StoreError(f"{self._storage.path(name)}: does not read back as it was written; check the store")

    def _reads_back(self, name: str, data: bytes) -> bool:
        try:
            return self._storage.get(name) == data
        except FileNotFoundError:
            return False

    def manifests(self, is_stale: Callable[[Manifest], bool] = lambda _: False) -> list[Manifest]:
        """Return the valid manifests, the largest step first; invalid and stale ones are logged and set aside."""
        found = []
        for name in self._storage.names():
            if MANIFEST_NAME.fullmatch(name):
                try:
                    manifest = Manifest.from_json(self._storage.get(name), name)
                except FileNotFoundError:
                    continue  # removed by retention meanwhile
                except SnapshotError as error:
                    self._reject(name, str(error))
                    continue
                if is_stale(manifest):
                    self._reject(name, f"generation {manifest.generation} saved it when a later one had gone on")
                else:
                    found.append(manifest)
        return sorted(found, key=lambda manifest: manifest.step, reverse=True)

    def load(self, manifest: Manifest) -> Snapshot:
        """Return a snapshot, checked against its manifest.

        Raises:
            SnapshotError: it is damaged.
            StoreError: there is no access to it, or it is whole and cannot be read here.
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
        self, *, after: int = -1, is_stale: Callable[[Manifest], bool] = lambda _: False
    ) -> Snapshot | None:
        """Return the newest whole snapshot of a step beyond `after`; damaged and stale newer ones are set aside."""
        for manifest in self.manifests(is_stale):
            if manifest.step <= after:
                break
            try:
                return self._load_current(manifest)
            except SnapshotError as error:
                self._reject(manifest.name, str(error))
        return None

    def _load_current(self, manifest: Manifest) -> Snapshot:
        """Load a snapshot; where that fails because it was replaced meanwhile, load the one that replaces it."""
        try:
            return self.load(manifest)
        except SnapshotError:
            try:
                current = Manifest.from_json(self._storage.get(manifest.name), manifest.name)
            except (FileNotFoundError, SnapshotError):
                current = manifest
            if current == manifest:
                raise
        return self._load_current(current)

    @property
    def location(self) -> str:
        """The directory or URL."""
        return self._storage.location

    def names(self) -> list[str]:
        """Return the names of what is there."""
        return self._storage.names()

    def path(self, step: int) -> str:
        """Return where the snapshot of a step is."""
        return self._storage.path(data_name(step))

    def _reject(self, manifest_name: str, reason: str) -> None:
        """Log that a snapshot is damaged or stale, and set it aside.

        The manifest is renamed first: without it the snapshot does not exist.
        """
        self.num_rejected += 1
        data_name = manifest_name.replace(".json", ".pt")
        log.warning("snapshot.rejected", path=self._storage.path(data_name), reason=reason)
        for name in () if self._read_only else (manifest_name, data_name):
            try:
                self._storage.rename(name, name + _ASIDE)
            except (FileNotFoundError, StoreError):
                continue  # a store that allows no renames is no reason not to load the snapshot before

    def _prune(self, saved_step: int, keep_last: int) -> None:
        """Remove the snapshots beyond `keep_last`, and data without a manifest.

        Snapshots beyond the step just saved do not count: they were found damaged and could not be set aside. Nor does
        a manifest without data, which a generation that has lost the lease may leave.
        """
        names = self._storage.names()
        manifests, data = (
            sorted(step for match in map(pattern.fullmatch, names) if match and (step := int(match[1])) <= saved_step)
            for pattern in (MANIFEST_NAME, DATA_NAME)
        )
        kept = {*[step for step in manifests if step in {*data}][-keep_last:]}
        for step in manifests:
            if step not in kept:
                self._storage.delete(f"step-{step:08d}.json")
        for step in data:
            if step not in kept:
                self._storage.delete(data_name(step))


def _manifest_of(data: bytes, manifest: Manifest) -> Manifest:
    """Return the manifest that describes some data: the one beside it, or the one that this replaces."""
    digest = hashlib.sha256(data).hexdigest()
    for known in filter(None, (manifest, manifest.replaces)):
        if (len(data), digest) == (known.size_bytes, known.sha256):
            return replace(known, replaces=None)
    if len(data) != manifest.size_bytes:
        raise SnapshotError(f"{len(data):,} bytes, its manifest says {manifest.size_bytes:,}")
    raise SnapshotError("its SHA-256 is not its manifest's")

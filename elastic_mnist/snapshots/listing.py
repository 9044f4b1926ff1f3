"""Lists the snapshots at a place, with a verdict on each; or judges one file, ours or another program's.

Each snapshot is read and checked against the SHA-256 of its manifest, one after the other. Nothing is changed, so a
job may run meanwhile: a snapshot that it prunes during the listing is left out.

The verdict on a snapshot is one of

    whole         matches its manifest
    damaged       does not match, or its manifest is not readable
    unreadable    access fails, or a later version of this program wrote it
    not read      only its manifest was read, and that is whole
    uncommitted   data without a manifest, which no reader uses: a job may be writing it
    set aside     found damaged by a job, and renamed
    readable      a single file without a checksum
    unfit         a single file that is no snapshot of this network
"""

import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from elastic_mnist.errors import SnapshotError, StoreError, UsageError
from elastic_mnist.settings import local_path
from elastic_mnist.snapshots import record as run_record
from elastic_mnist.snapshots.durable import DurableTier, Snapshot
from elastic_mnist.snapshots.importers import ForeignFile
from elastic_mnist.snapshots.lookup import find, locate
from elastic_mnist.snapshots.manifest import Manifest
from elastic_mnist.snapshots.record import RunRecord
from elastic_mnist.snapshots.storage import Storage
from elastic_mnist.training.model import weights_sha256

BAD: Final = ("damaged", "unfit")
GOOD: Final = ("whole", "readable", "not read")
NEUTRAL: Final = ("unreadable", "uncommitted", "set aside")

_NAME: Final = re.compile(r"(step-(\d{8,}))\.(?:pt|json)(\..+)?")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A snapshot and what is known of it.

    Attributes:
        path: where its data is.
        verdict: see the module.
        reason: why it is no better.
        kind: what a foreign file is, for people.
        step, epoch, samples_in_epoch: what is finished.
        size_bytes: of the data.
        created_at: seconds since the epoch of UTC.
        test_accuracy: of the last evaluation before it.
        run_id, generation: who wrote it.
        weights_sha256: of the weights.
        lacking: what a foreign file lacks, a text each.
    """

    path: str
    verdict: str
    reason: str | None = None
    kind: str | None = None
    step: int | None = None
    epoch: int | None = None
    samples_in_epoch: int | None = None
    size_bytes: int | None = None
    created_at: float | None = None
    test_accuracy: float | None = None
    run_id: str | None = None
    generation: int | None = None
    weights_sha256: str | None = None
    lacking: tuple[str, ...] = ()

    @property
    def age_seconds(self) -> float | None:
        """How long ago it was made; 0 where another machine's clock is ahead of ours."""
        return None if self.created_at is None else max(0.0, time.time() - self.created_at)


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What is at a place."""

    location: str
    entries: Sequence[Entry]
    record: RunRecord | None = None
    record_damage: str | None = None
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def verdict(self) -> str:
        """`damaged` where anything is; else `unreadable`, `empty` or `whole`."""
        if self.record_damage or any(self.counts[verdict] for verdict in BAD):
            return "damaged"
        if self.counts["unreadable"]:
            return "unreadable"
        return "whole" if any(self.counts[verdict] for verdict in GOOD) else "empty"


def look(location: str, *, verify: bool) -> Listing:
    """Look at a place or a file.

    Raises:
        UsageError: nothing is there, or it cannot be accessed.
    """
    storage, name = locate(location, named="PATH_OR_URL")
    if name is not None:
        entry = _file(storage, name, location, verify=verify)
        return Listing(location=storage.path(name), entries=[entry], counts=Counter([entry.verdict]))
    names = storage.names()
    path = local_path(location)
    if not names and path is not None and not path.is_dir():
        raise UsageError(f"PATH_OR_URL {location}: no such directory; name another")
    entries = list(_entries(storage, names, verify=verify))
    record, damage = _record(storage)
    return Listing(
        location=storage.location,
        entries=entries,
        record=record,
        record_damage=damage,
        counts=Counter(entry.verdict for entry in entries),
    )


def _entries(storage: Storage, names: Iterable[str], *, verify: bool) -> Iterable[Entry]:
    """Yield the snapshots among some names, the largest step first; of one step, what was set aside comes last."""
    known = [match for match in map(_NAME.fullmatch, names) if match]
    places = {(int(match[2]), match[1], match[3] or "") for match in known}
    for step, stem, aside in sorted(places, key=lambda place: (-place[0], place[2])):
        path = storage.path(f"{stem}.pt{aside}")
        if aside:
            yield Entry(path=path, verdict="set aside", step=step)
        elif f"{stem}.json" not in names:
            yield Entry(path=path, verdict="uncommitted", step=step)
        else:
            entry = _committed(storage, stem, verify=verify)
            if entry is not None:
                yield entry


def _committed(storage: Storage, stem: str, *, verify: bool) -> Entry | None:
    """Judge a snapshot that has a manifest; None where it is gone meanwhile."""
    facts: dict[str, Any] = {"path": storage.path(f"{stem}.pt"), "step": int(stem.removeprefix("step-"))}
    name = f"{stem}.json"
    try:
        manifest = Manifest.from_json(storage.get(name), name)
        facts |= _known(manifest)
        if not verify:
            return Entry(**facts, verdict="not read")
        loaded = DurableTier(storage, read_only=True).load(manifest).manifest
        assert loaded is not None
        facts |= _known(loaded)  # or what this manifest has replaced, and whose data is there still
    except FileNotFoundError:
        return None
    except SnapshotError as error:
        return None if _is_gone(storage, name) else Entry(**facts, verdict="damaged", reason=str(error))
    except StoreError as error:
        return Entry(**facts, verdict="unreadable", reason=str(error))
    return Entry(**facts, verdict="whole")


def _known(manifest: Manifest) -> dict[str, Any]:
    shown = ("epoch", "samples_in_epoch", "size_bytes", "created_at", "test_accuracy", "run_id", "generation")
    return {key: getattr(manifest, key) for key in (*shown, "weights_sha256")}


def _is_gone(storage: Storage, name: str) -> bool:
    try:
        storage.get(name)
    except FileNotFoundError:
        return True
    return False


def _file(storage: Storage, name: str, location: str, *, verify: bool) -> Entry:
    """Judge a file that was named."""
    match = _NAME.fullmatch(name)
    if match and name.endswith(".pt"):
        entry = _committed(storage, match[1], verify=verify)
        if entry is not None:
            return entry
    try:
        found = find(location, named="PATH_OR_URL", allow_foreign=True)
    except SnapshotError as error:
        return Entry(path=storage.path(name), verdict="unfit", reason=str(error).partition(": ")[2])
    return _foreign(found) if isinstance(found, ForeignFile) else _copy(found)


def _copy(found: Snapshot) -> Entry:
    shown = ("step", "epoch", "samples_in_epoch", "run_id", "generation")
    return Entry(
        path=found.path,
        verdict="readable",
        reason="no manifest beside it",
        size_bytes=len(found.data),
        test_accuracy=found.state["progress"].get("test_accuracy"),
        weights_sha256=weights_sha256(found.state["model"]),
        **{key: value for key, value in cast("dict[str, Any]", found.state).items() if key in shown},
    )


def _foreign(found: ForeignFile) -> Entry:
    return Entry(
        path=found.path,
        verdict="readable",
        kind=found.foreign.kind,
        epoch=found.foreign.num_epochs,
        size_bytes=found.size_bytes,
        weights_sha256=weights_sha256(found.foreign.model),
        lacking=found.foreign.lacking,
    )


def _record(storage: Storage) -> tuple[RunRecord | None, str | None]:
    """Return the run's record, None where there is none; and how it is damaged."""
    try:
        return RunRecord.from_plain(json.loads(storage.get(run_record.NAME))), None
    except FileNotFoundError:
        return None, None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return None, f"{run_record.NAME} is not readable: {type(error).__name__}"

"""Where a generation goes on from.

Invariant: rank 0 alone decides, from what it alone may see, and all ranks get the decision and the state by
broadcast. A run never starts afresh over another run's snapshots, and never goes on under settings that
change its result unless it is told to.
"""

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from elastic_mnist.errors import SnapshotError, UsageError
from elastic_mnist.events import identify, log
from elastic_mnist.sampler import Position
from elastic_mnist.settings import Settings
from elastic_mnist.snapshots import record as run_record
from elastic_mnist.snapshots.contract import Contract, accept, differences, resolve
from elastic_mnist.snapshots.durable import DurableTier, Manifest, Snapshot, find
from elastic_mnist.snapshots.record import ProgressMark, RunRecord
from elastic_mnist.snapshots.state import State, position_of, unpack
from elastic_mnist.snapshots.storage import Storage

_ORDER: Final = ("dataset", "train_samples", "data_sha256", "seed")
"""The fields of the contract that the order of an epoch's samples hangs on."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """What all ranks of a generation know before its first step.

    Attributes:
        record: the run, claimed for this generation.
        asked: the contract as rank 0's settings ask for it; the other ranks' must be the same.
        source: "fresh", "storage" or "file".
        path: where the state comes from; None for a fresh start.
        num_lost_steps: steps that the generation before made and this one must make again; None: not known.
        finished: the manifest of the final snapshot, where nothing is left to do.
        data: the snapshot's bytes; None for a fresh start.
    """

    record: RunRecord
    asked: Contract
    source: str
    path: str | None = None
    num_lost_steps: int | None = 0
    finished: Manifest | None = None
    data: bytes | None = None

    def state(self) -> State | None:
        """Return the state to go on from, None for a fresh start."""
        return None if self.data is None else unpack(self.data)


def decide(
    storage: Storage,
    tier: DurableTier,
    settings: Settings,
    asked: Contract,
    *,
    world_size: int,
    device_type: str,
    mark_path: Path,
) -> Start:
    """Decide on rank 0, and claim the run where there is something to do.

    Raises:
        UsageError: the snapshots are another job's, or cannot be read or written.
    """
    recorded = run_record.read(storage)
    if recorded is not None:
        identify(run_id=recorded.run_id, generation=recorded.generation)  # what is told from here on is of this run
    found, source, known = tier.newest_valid(), "storage", None
    if found is not None:
        recorded = _of_snapshot(recorded, found.state)
        known = recorded.contract
    elif settings.resume_from is not None:
        found, source = _find(settings.resume_from), "file"
        known = found.state["contract"]
        if recorded is not None and recorded.resumed_from == found.path and not differences(recorded.contract, asked):
            known = recorded.contract  # a run from this file that was lost before its first snapshot
    else:
        source = "fresh"
        if recorded is not None:
            # A run that was lost before its first snapshot, or whose snapshots are damaged, or that is at work now.
            known = recorded.contract

    path = None if found is None else found.path
    if known is None:
        contract = resolve(asked, world_size=world_size, device_type=device_type)
    else:
        contract = _agreed(known, asked, settings, path or storage.location, world_size)
        _check_mid_epoch(contract, found, asked)
        if contract != known:
            log.warning("run.settings_changed", changed=differences(known, asked))
    new_run = RunRecord.new(contract, started_at=time.time(), resumed_from=path if source == "file" else None)
    start = Start(record=new_run, asked=asked, source=source, path=path, data=None if found is None else found.data)
    position = Position() if found is None else position_of(found.state)
    if recorded is not None and known is not None and (source != "file" or known is recorded.contract):
        if recorded.is_finished and found is not None and source == "storage" and position.epoch >= settings.epochs:
            return replace(start, record=recorded, data=None, finished=found.manifest)
        start = _go_on(start, recorded, contract, position, mark_path)
    storage.create()
    run_record.write(storage, start.record)
    return start


def to_bytes(start: Start | UsageError) -> bytes:
    """Serialise rank 0's decision, or the error that keeps it from one, for the other ranks."""
    if isinstance(start, UsageError):
        return _frame({"error": str(start)}, b"")
    head = {
        "record": start.record.to_plain(),
        "asked": start.asked,
        "source": start.source,
        "path": start.path,
        "num_lost_steps": start.num_lost_steps,
        "finished": start.finished.to_json().decode() if start.finished else None,
        "has_data": start.data is not None,
    }
    return _frame(head, start.data or b"")


def from_bytes(message: bytes) -> Start:
    """Read what `to_bytes` made; raises the `UsageError` where rank 0 had one."""
    size = int.from_bytes(message[:8], "little")
    head, data = json.loads(message[8 : 8 + size]), message[8 + size :]
    if "error" in head:
        raise UsageError(head["error"])
    finished = head["finished"]
    return Start(
        record=RunRecord.from_plain(head["record"]),
        asked=head["asked"],
        source=head["source"],
        path=head["path"],
        num_lost_steps=head["num_lost_steps"],
        finished=_manifest(finished.encode()) if finished else None,
        data=data if head["has_data"] else None,
    )


def check_same_settings(start: Start, asked: Contract) -> None:
    """Raise `UsageError` where this rank was started with other settings than rank 0."""
    changed = [name for name in asked if asked[name] != start.asked.get(name)]
    if changed:
        texts = "; ".join(f"{name} is {asked[name]} here and {start.asked.get(name)} at rank 0" for name in changed)
        raise UsageError(f"settings differ between the nodes: {texts}; start all nodes with the same options")


def _go_on(start: Start, recorded: RunRecord, contract: Contract, position: Position, mark_path: Path) -> Start:
    """Return the start as the next generation of the recorded run."""
    reached = ProgressMark.read(mark_path, recorded)
    num_lost_steps = None if reached is None else max(0, reached - position.step)
    record = recorded.next_generation(num_lost_steps=num_lost_steps or 0, contract=contract)
    return replace(start, record=record, num_lost_steps=num_lost_steps)


def _check_mid_epoch(contract: Contract, found: Snapshot | None, asked: Contract) -> None:
    """Refuse another order of samples in the middle of an epoch: "each sample once" would have no meaning."""
    if found is None or not found.state["samples_in_epoch"]:
        return
    if found.state["samples_in_epoch"] >= found.state["contract"].get("train_samples", asked["train_samples"]):
        raise UsageError(f"{found.path}: samples_in_epoch lies beyond the epoch's end; name another snapshot")
    changed = [name for name in _ORDER if found.state["contract"].get(name) != contract[name]]
    if changed:
        raise UsageError(
            f"{found.path} lies in the middle of an epoch, where {' and '.join(changed)} cannot change, not even with "
            f"--accept_changes; change it at the end of an epoch"
        )


def _find(location: str) -> Snapshot:
    """Return the snapshot that `--resume_from` names."""
    try:
        return find(location, named="--resume_from")
    except SnapshotError as error:
        raise UsageError(f"{error}; name another snapshot") from None


def _of_snapshot(recorded: RunRecord | None, state: State) -> RunRecord:
    """Return the run that a snapshot belongs to, also where its record is lost or another's."""
    if recorded is not None and recorded.run_id == state["run_id"]:
        return recorded
    lost = RunRecord.new(state["contract"], started_at=state["started_at"])
    return replace(lost, run_id=state["run_id"], generation=state["generation"])


def _agreed(recorded: Contract, asked: Contract, settings: Settings, where: str, world_size: int) -> Contract:
    """Return the contract to go on under; raises `UsageError` for a change that was not accepted."""
    changed = differences(recorded, asked)
    if not changed:
        return recorded
    if not settings.accept_changes:
        raise UsageError(
            f"{where} was made under other settings: {'; '.join(changed)}; choose another --snapshot_path, "
            f"or go on under the new ones with --accept_changes"
        )
    return accept(recorded, asked, world_size=world_size)


def _frame(head: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + data


def _manifest(data: bytes) -> Manifest:
    return Manifest.from_json(data, f"step-{json.loads(data)['step']:08d}.json")

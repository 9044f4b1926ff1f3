"""Where a generation goes on from.

Invariant: rank 0 alone decides, from what it may see of the durable tier and from what each node offers of its memory
tier; all ranks get the decision, and the state by broadcast from whoever holds it. The largest step of the run wins;
under the same settings a step has the same bits, whoever made it. A run never starts afresh over another run's
snapshots, and never goes on under settings that change its result unless it is told to.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NoReturn

from elastic_mnist.errors import SnapshotError, StoreError, UsageError
from elastic_mnist.settings import Settings, disagreements
from elastic_mnist.snapshots import record as run_record
from elastic_mnist.snapshots.durable import DurableTier, Snapshot
from elastic_mnist.snapshots.holder import LeaseHolder
from elastic_mnist.snapshots.importers import ForeignFile
from elastic_mnist.snapshots.lease import Lease, is_stale, refuse_if_in_use
from elastic_mnist.snapshots.lookup import find
from elastic_mnist.snapshots.manifest import Manifest
from elastic_mnist.snapshots.progress import ProgressFile
from elastic_mnist.snapshots.record import RunRecord
from elastic_mnist.snapshots.run_config import RequestedConfig, RunConfig, accept, differences, resolve
from elastic_mnist.snapshots.state import State, pack, position_of, unpack
from elastic_mnist.snapshots.storage import Storage
from elastic_mnist.telemetry.events import identify, log
from elastic_mnist.training.sampler import Position, num_steps_per_epoch

_ORDER: Final = ("dataset", "train_samples", "data_sha256", "seed")
"""The fields of the contract that the order of an epoch's samples hangs on."""

MAX_STALLED: Final = 3
"""More deaths at one and the same step are no accident."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """What a node's memory tier holds, without the state itself.

    Attributes:
        rank: of the process that can read it.
        record: the run and the generation that it is of.
        position: what is finished.
    """

    rank: int
    record: RunRecord
    position: Position


@dataclass(frozen=True, kw_only=True)
class Start:
    """What all ranks of a generation know before its first step.

    Attributes:
        record: the run, claimed for this generation.
        asked: the contract as rank 0's settings ask for it; the other ranks' must be the same.
        source: "fresh", "memory", "storage" or "file".
        path: where the state comes from; None for a fresh start and for memory.
        num_lost_steps: steps that the generation before made and this one must make again; None: not known.
        saved: what is finished in the newest durable snapshot of the run; None where there is none.
        finished: the manifest of the final snapshot, where nothing is left to do.
        state_rank: the rank that has the state's bytes; None where there are none.
        data: the state's bytes; None where there are none, and until `state_rank` has sent them.
        claim: rank 0's lease on the snapshot path; None at other ranks.
    """

    record: RunRecord
    asked: Mapping[str, Any]
    source: str
    path: str | None = None
    num_lost_steps: int | None = 0
    saved: Position | None = None
    finished: Manifest | None = None
    state_rank: int | None = None
    data: bytes | None = None
    claim: Lease | None = field(default=None, compare=False)

    def state(self) -> State | None:
        """Return the state to go on from, None for a fresh start."""
        return None if self.data is None else unpack(self.data)

    def for_broadcast(self) -> "Start":
        """Return the decision as rank 0 sends it: without the state, which is sent next, and without the lease."""
        return replace(self, data=None, claim=None)


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What a run may go on from.

    Attributes:
        source: as in `Start`.
        position: what is finished there.
        record: the run that it is of; None for a run that begins.
        known: the contract that it was made under; None where there is none.
        saved: what is finished in the newest durable snapshot of the run.
        snapshot: of the durable tier, or a file.
        offer: of a memory tier.
    """

    source: str
    position: Position = field(default_factory=Position)
    record: RunRecord | None = None
    known: RunConfig | None = None
    saved: Position | None = None
    snapshot: Snapshot | ForeignFile | None = None
    offer: Candidate | None = None


def decide(
    storage: Storage,
    tier: DurableTier,
    settings: Settings,
    asked: RequestedConfig,
    *,
    world_size: int,
    device_type: str,
    mark_path: Path,
    holder: LeaseHolder,
    offers: Sequence[Candidate] = (),
) -> Start:
    """Decide on rank 0, and claim the run where there is something to do; `offers` are of the nodes' memory tiers.

    Raises:
        UsageError: the snapshots are another job's, or cannot be read or written; or going on is of no use.
    """
    seen, found = _survey(storage, tier, settings, asked, holder=holder, offers=offers)
    path = None if found.snapshot is None else found.snapshot.path
    if found.known is None:
        contract = resolve(asked, world_size=world_size, device_type=device_type)
    else:
        contract = _agreed(found.known, asked, settings, path or storage.location, world_size)
        if isinstance(found.snapshot, Snapshot):
            _check_mid_epoch(contract, found.snapshot, asked)
        if contract != found.known:
            log.warning("run.settings_changed", changed=differences(found.known, asked))

    new_run = RunRecord.new(contract, started_at=time.time(), resumed_from=path if found.source == "file" else None)
    position = found.position
    if isinstance(found.snapshot, ForeignFile):
        position = _position_of(found.snapshot, contract, settings)
    start = Start(
        record=new_run,
        asked=asked,
        source=found.source,
        path=path,
        saved=found.saved,
        state_rank=found.offer.rank if found.offer is not None else 0 if found.snapshot is not None else None,
        data=found.snapshot.data if isinstance(found.snapshot, Snapshot) else None,
    )
    if found.record is not None:
        if found.record.is_finished and found.source == "storage" and position.epoch >= settings.epochs:
            assert isinstance(found.snapshot, Snapshot)
            return replace(start, record=found.record, state_rank=None, data=None, finished=found.snapshot.manifest)
        start = _go_on(start, found.record, position, mark_path, holder)
    record = replace(start.record, holder=holder, began_at=position.step)
    if record.num_stalled >= MAX_STALLED:
        _give_up(record, storage, seen)
    if isinstance(found.snapshot, ForeignFile):
        start = replace(start, data=pack(_state_of(found.snapshot, position, settings, record, world_size)))
    return replace(start, record=record, claim=_claim(storage, record, seen, may_wait=found.source == "memory"))


def _survey(
    storage: Storage,
    tier: DurableTier,
    settings: Settings,
    asked: RequestedConfig,
    *,
    holder: LeaseHolder,
    offers: Sequence[Candidate],
) -> tuple[str | None, _Found]:
    """Return the version of the run's record that was seen, and what there is to go on from."""
    offers = [offer for offer in offers if not differences(offer.record.contract, asked)]
    seen, recorded = None, None
    try:
        seen = storage.etag(run_record.NAME)
        recorded = run_record.read(storage)
        if recorded is not None:
            identify(run_id=recorded.run_id, generation=recorded.generation)  # what is told from here on is of this run
            refuse_if_in_use(recorded, holder, storage.location)  # before anything of it is touched
        return seen, _look(tier, settings, asked, recorded, offers)
    except StoreError as error:
        # A store that is away for a while does not end a job whose state is at hand.
        if not offers:
            raise
        log.warning("snapshot.store_unreachable", reason=str(error))
        return seen, _of_memory(max(offers, key=_rank_offer), recorded)


def _claim(storage: Storage, record: RunRecord, seen: str | None, *, may_wait: bool) -> Lease:
    """Claim the place; where that `may_wait`, and the store is away, the next durable snapshot will do it."""
    claim = Lease(storage, record, seen)
    try:
        storage.create()
        claim.acquire()
    except StoreError as error:
        if not may_wait:
            raise
        log.warning("snapshot.store_unreachable", reason=str(error))
    return claim


def _look(
    tier: DurableTier,
    settings: Settings,
    asked: RequestedConfig,
    recorded: RunRecord | None,
    offers: Sequence[Candidate],
) -> _Found:
    """Return what there is to go on from."""
    held = max(offers, key=_rank_offer, default=None)
    if held is not None and recorded is not None and recorded.run_id != held.record.run_id:
        raise UsageError(
            f"{tier.location} holds the snapshots of run {recorded.run_id}, and this is run {held.record.run_id}; "
            f"choose another --snapshot_path"
        )
    is_finished = recorded is not None and recorded.is_finished
    # That of the very step that is held is looked at, too: it may be what the job is about to tell that it has saved.
    newest = tier.newest_valid(
        after=-1 if held is None or is_finished else held.position.step - 1,
        is_stale=lambda manifest: is_stale(manifest, recorded),
    )
    if newest is not None and (held is None or is_finished or newest.state["step"] > held.position.step):
        record = _of_snapshot(recorded, newest.state)
        position = position_of(newest.state)
        return _Found(
            source="storage",
            position=position,
            record=record,
            known=record.contract,
            saved=position,
            snapshot=newest,
        )
    if held is not None:
        saved = _newest_position(tier, before=held.position.step) if newest is None else _saved_for_good(newest.state)
        return replace(_of_memory(held, recorded), saved=saved)
    if settings.resume_from is not None:
        return _of_file(settings.resume_from, recorded, asked)
    # A run that was lost before its first snapshot, or whose snapshots are damaged, or none.
    return _Found(source="fresh", record=recorded, known=None if recorded is None else recorded.contract)


def _rank_offer(offer: Candidate) -> tuple[int, int]:
    return offer.position.step, -offer.rank


def _of_memory(held: Candidate, recorded: RunRecord | None = None) -> _Found:
    """Go on from a memory tier, in the run's latest generation that is known of."""
    record = max(filter(None, [recorded, held.record]), key=lambda record: record.generation)
    return _Found(source="memory", position=held.position, record=record, known=record.contract, offer=held)


def _of_file(location: str, recorded: RunRecord | None, asked: RequestedConfig) -> _Found:
    """Begin a run from a snapshot elsewhere, or go on with one that began so and was lost before its first snapshot."""
    snapshot = _find(location)
    if isinstance(snapshot, ForeignFile):
        known, position = None, Position()
    else:
        known, position = snapshot.state["contract"], position_of(snapshot.state)
    record = None
    if recorded is not None and recorded.resumed_from == snapshot.path and not differences(recorded.contract, asked):
        known, record = recorded.contract, recorded
    return _Found(source="file", position=position, record=record, known=known, snapshot=snapshot)


def _position_of(file: ForeignFile, contract: RunConfig, settings: Settings) -> Position:
    """Return what another program's file says is finished; raises `UsageError` where that is all there is to do."""
    num_epochs = file.foreign.num_epochs or 0
    if num_epochs >= settings.epochs:
        raise UsageError(
            f"{file.path}: {num_epochs} epochs are finished there, and --epochs is {settings.epochs}; ask for more"
        )
    num_steps = num_epochs * num_steps_per_epoch(contract["train_samples"], contract["global_batch_size"])
    return Position(epoch=num_epochs, step=num_steps)


def _state_of(file: ForeignFile, position: Position, settings: Settings, record: RunRecord, world_size: int) -> State:
    """Return another program's file as the state of a run that begins with it; what it lacks is told."""
    foreign, contract = file.foreign, record.contract
    if foreign.lacking:
        log.warning("snapshot.incomplete", path=file.path, kind=foreign.kind, lacking=list(foreign.lacking))
    return {
        "model": foreign.model,
        "optimizer": foreign.optimizer or {"state": {}},
        "epoch": position.epoch,
        "samples_in_epoch": position.samples_in_epoch,
        "step": position.step,
        "global_batch_size": contract["global_batch_size"],
        "micro_batch_size": contract["micro_batch_size"],
        "seed": contract["seed"],
        "settings": settings.as_plain(),
        "contract": contract,
        "dataset": {
            "name": contract["dataset"],
            "num_samples": contract["train_samples"],
            "sha256": contract["data_sha256"],
        },
        "versions": {},
        "world_size": world_size,
        "run_id": record.run_id,
        "generation": record.generation,
        "started_at": record.started_at,
        "progress": {"num_evaluated_epochs": position.epoch},
    }


def _saved_for_good(state: State) -> Position | None:
    """Return what is finished in a snapshot; None where it is to be made again, with the evaluation of its epoch."""
    position = position_of(state)
    num_evaluated_epochs = state["progress"].get("num_evaluated_epochs", position.epoch)
    return None if position.samples_in_epoch == 0 and num_evaluated_epochs < position.epoch else position


def _newest_position(tier: DurableTier, *, before: int) -> Position | None:
    """Return what is finished in the newest durable snapshot, of a step before that, that has a manifest."""
    return next((manifest.position for manifest in tier.manifests() if manifest.step < before), None)


def check_same_settings(start: Start, asked: Mapping[str, Any]) -> None:
    """Raise `UsageError` where this rank was started with other settings than rank 0."""
    texts = disagreements(asked, start.asked, "at rank 0")
    if texts:
        raise UsageError(f"settings differ between the nodes: {texts}; start all nodes with the same options")


def _go_on(start: Start, recorded: RunRecord, position: Position, mark_path: Path, holder: LeaseHolder) -> Start:
    """Return the start as the next generation of the recorded run."""
    reached = ProgressFile.read(mark_path, recorded)
    num_lost_steps = None if reached is None else max(0, reached - position.step)
    record = recorded.next_generation(num_lost_steps=num_lost_steps or 0, contract=start.record.contract)
    if reached is None and position.step == recorded.began_at:  # it ended before it could make its mark
        reached = position.step
    if recorded.holder.job_id != holder.job_id:  # somebody has looked at it, and started it again
        record = replace(record, reached=reached, num_stalled=0)
    elif reached is not None:
        num_stalled = recorded.num_stalled + 1 if reached == recorded.reached else 0
        record = replace(record, reached=reached, num_stalled=num_stalled)
    return replace(start, record=record, num_lost_steps=num_lost_steps)


def _give_up(record: RunRecord, storage: Storage, seen: str | None) -> NoReturn:
    """Raise `UsageError`: the last generations of this launch have all ended at the same step."""
    reason = f"{record.num_stalled + 1} generations in a row have ended at step {record.reached}"
    # Started again, it may try as often again: a launch does not always have a name of its own.
    _claim(storage, replace(record, num_stalled=0, reached=None, began_at=None), seen, may_wait=True)
    raise UsageError(f"{reason}; the event log and the output above say why. Put it right, and start the job again")


def _check_mid_epoch(contract: RunConfig, found: Snapshot, asked: RequestedConfig) -> None:
    """Refuse another order of samples in the middle of an epoch: "each sample once" would have no meaning."""
    if not found.state["samples_in_epoch"]:
        return
    if found.state["samples_in_epoch"] >= found.state["contract"].get("train_samples", asked["train_samples"]):
        raise UsageError(f"{found.path}: samples_in_epoch lies beyond the epoch's end; name another snapshot")
    changed = [name for name in _ORDER if found.state["contract"].get(name) != contract[name]]
    if changed:
        raise UsageError(
            f"{found.path} lies in the middle of an epoch, where {' and '.join(changed)} cannot change, not even with "
            f"--accept_changes; change it at the end of an epoch"
        )


def _find(location: str) -> Snapshot | ForeignFile:
    """Return the snapshot that `--resume_from` names."""
    try:
        return find(location, named="--resume_from", allow_foreign=True)
    except SnapshotError as error:
        raise UsageError(f"{error}; name another snapshot") from None


def _of_snapshot(recorded: RunRecord | None, state: State) -> RunRecord:
    """Return the run that a snapshot belongs to, also where its record is lost or another's."""
    if recorded is not None and recorded.run_id == state["run_id"]:
        return recorded
    lost = RunRecord.new(state["contract"], started_at=state["started_at"])
    return replace(lost, run_id=state["run_id"], generation=state["generation"])


def _agreed(recorded: RunConfig, asked: RequestedConfig, settings: Settings, where: str, world_size: int) -> RunConfig:
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

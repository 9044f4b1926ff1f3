"""What a run may resume from: the nodes' memory tiers, the durable tier, a file that `--resume_from` names, or nothing.

Invariant: the largest step of the run wins; under the same settings a step has the same bits, whichever generation made
it. An error of access is never read as "no snapshot". Rank 0 alone looks and chooses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from elastic_mnist.errors import SnapshotError, StoreError, UsageError
from elastic_mnist.snapshots import record as run_record
from elastic_mnist.snapshots.durable import DurableTier, Snapshot
from elastic_mnist.snapshots.holder import LeaseHolder
from elastic_mnist.snapshots.importers import ForeignFile
from elastic_mnist.snapshots.lease import is_stale, refuse_if_in_use
from elastic_mnist.snapshots.lookup import find
from elastic_mnist.snapshots.record import RunRecord
from elastic_mnist.snapshots.run_config import RunConfig, StartRequest, differences
from elastic_mnist.snapshots.state import State, pack, position_of
from elastic_mnist.snapshots.storage import Storage
from elastic_mnist.telemetry.events import identify, log
from elastic_mnist.training.sampler import Position, num_steps_per_epoch

SourceKind = Literal["fresh", "memory", "storage", "file"]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """What a node's memory tier holds, without the state itself.

    Attributes:
        rank: of the process that can read it.
        record: the run and the generation that wrote it.
        position: what is finished.
    """

    rank: int
    record: RunRecord
    position: Position


@dataclass(frozen=True, kw_only=True)
class ResumeSource:
    """What a run resumes from.

    Attributes:
        kind: where the state is; "fresh" where there is none.
        position: what is finished there.
        record: the run to continue; None for a new one.
        config: what it was made under; None where nothing was.
        saved: what is finished in the newest durable snapshot of the run; None where there is none.
        snapshot: for the kinds "storage" and "file".
        rank: whose memory tier has the state, for the kind "memory".
    """

    kind: SourceKind
    position: Position = field(default_factory=Position)
    record: RunRecord | None = None
    config: RunConfig | None = None
    saved: Position | None = None
    snapshot: Snapshot | None = None
    rank: int | None = None

    @property
    def path(self) -> str | None:
        """Where the snapshot is."""
        return None if self.snapshot is None else self.snapshot.path

    @property
    def state_rank(self) -> int | None:
        """The rank that has the state; None for a fresh start."""
        return self.rank if self.snapshot is None else 0


def find_source(
    storage: Storage, tier: DurableTier, request: StartRequest, holder: LeaseHolder, candidates: Sequence[Candidate]
) -> tuple[str | None, ResumeSource]:
    """Return the etag of the run's record as it was read, and what to resume from.

    Raises:
        UsageError: the snapshots are another job's, or cannot be read.
    """
    candidates = [candidate for candidate in candidates if not differences(candidate.record.contract, request.config)]
    etag, recorded = None, None
    try:
        etag = storage.etag(run_record.NAME)
        recorded = run_record.read(storage)
        if recorded is not None:
            identify(run_id=recorded.run_id, generation=recorded.generation)  # events from here on are of this run
            refuse_if_in_use(recorded, holder, storage.location)  # before anything of it is touched
        return etag, choose_source(tier, request, recorded, candidates)
    except StoreError as error:
        # A store that is away for a while does not end a job whose state is in memory.
        if not candidates:
            raise
        log.warning("snapshot.store_unreachable", reason=str(error))
        return etag, _from_memory(max(candidates, key=_order), recorded)


def choose_source(
    tier: DurableTier, request: StartRequest, recorded: RunRecord | None, candidates: Sequence[Candidate]
) -> ResumeSource:
    """Return the source with the largest step; raises `UsageError` where the snapshots are another run's."""
    held = max(candidates, key=_order, default=None)
    if held is not None and recorded is not None and recorded.run_id != held.record.run_id:
        raise UsageError(
            f"{tier.location} holds the snapshots of run {recorded.run_id}, and this is run {held.record.run_id}; "
            f"choose another --snapshot_path"
        )
    is_finished = recorded is not None and recorded.is_finished
    in_memory = -1 if held is None or is_finished else held.position.step
    # A snapshot of the very step in memory is read too: it may be what the job is about to log as saved.
    newest = tier.newest_valid(after=in_memory - 1, is_stale=lambda manifest: is_stale(manifest, recorded))
    if newest is not None and newest.state["step"] > in_memory:
        return _from_storage(newest, recorded)
    if held is not None:
        saved = _newest_position(tier, before=held.position.step) if newest is None else _saved_for_good(newest.state)
        return replace(_from_memory(held, recorded), saved=saved)
    if request.settings.resume_from is not None:
        return _from_file(request.settings.resume_from, recorded, request)
    # A run that was lost before its first snapshot, or whose snapshots are damaged, or none.
    return ResumeSource(kind="fresh", record=recorded, config=None if recorded is None else recorded.contract)


def _order(candidate: Candidate) -> tuple[int, int]:
    return candidate.position.step, -candidate.rank


def _from_memory(held: Candidate, recorded: RunRecord | None) -> ResumeSource:
    """Resume from a memory tier, after the latest generation of the run that is known."""
    record = max(filter(None, [recorded, held.record]), key=lambda record: record.generation)
    return ResumeSource(kind="memory", position=held.position, record=record, config=record.contract, rank=held.rank)


def _from_storage(newest: Snapshot, recorded: RunRecord | None) -> ResumeSource:
    """Resume from a snapshot of the durable tier; where the run's record is lost or another's, it is made anew."""
    state, position = newest.state, position_of(newest.state)
    record = recorded
    if record is None or record.run_id != state["run_id"]:
        lost = RunRecord.new(state["contract"], started_at=state["started_at"])
        record = replace(lost, run_id=state["run_id"], generation=state["generation"])
    return ResumeSource(
        kind="storage", position=position, record=record, config=record.contract, saved=position, snapshot=newest
    )


def _from_file(location: str, recorded: RunRecord | None, request: StartRequest) -> ResumeSource:
    """Begin a run from a snapshot elsewhere, or continue one that began so and was lost before its first snapshot."""
    try:
        found = find(location, named="--resume_from", allow_foreign=True)
    except SnapshotError as error:
        raise UsageError(f"{error}; name another snapshot") from None
    record = None
    if recorded is not None and recorded.resumed_from == found.path:
        record = None if differences(recorded.contract, request.config) else recorded
    if isinstance(found, ForeignFile):
        found = _imported(found, request, request.new_config() if record is None else record.contract)
    return ResumeSource(
        kind="file",
        position=position_of(found.state),
        record=record,
        config=found.state["contract"] if record is None else record.contract,
        snapshot=found,
    )


def _imported(file: ForeignFile, request: StartRequest, config: RunConfig) -> Snapshot:
    """Return another program's file as a snapshot of ours; what it lacks is logged.

    Raises:
        UsageError: it has finished all epochs that are asked for.
    """
    foreign, num_epochs = file.foreign, file.foreign.num_epochs or 0
    if num_epochs >= request.settings.epochs:
        raise UsageError(
            f"{file.path}: {num_epochs} epochs are finished there, and --epochs is {request.settings.epochs}; "
            f"ask for more"
        )
    if foreign.lacking:
        log.warning("snapshot.incomplete", path=file.path, kind=foreign.kind, lacking=list(foreign.lacking))
    state: State = {
        "model": foreign.model,
        "optimizer": foreign.optimizer or {"state": {}},
        "epoch": num_epochs,
        "samples_in_epoch": 0,
        "step": num_epochs * num_steps_per_epoch(config["train_samples"], config["global_batch_size"]),
        "global_batch_size": config["global_batch_size"],
        "micro_batch_size": config["micro_batch_size"],
        "seed": config["seed"],
        "settings": request.settings.as_plain(),
        "contract": config,
        "dataset": {
            "name": config["dataset"],
            "num_samples": config["train_samples"],
            "sha256": config["data_sha256"],
        },
        "versions": {},
        "world_size": request.world_size,
        "run_id": "",  # it is of no run of ours
        "generation": 0,
        "started_at": 0.0,
        "progress": {"num_evaluated_epochs": num_epochs},
    }
    return Snapshot(path=file.path, data=pack(state), state=state, manifest=None)


def _saved_for_good(state: State) -> Position | None:
    """Return what is finished in a snapshot; None where it is to be saved again, with the evaluation of its epoch."""
    position = position_of(state)
    num_evaluated_epochs = state["progress"].get("num_evaluated_epochs", position.epoch)
    return None if position.samples_in_epoch == 0 and num_evaluated_epochs < position.epoch else position


def _newest_position(tier: DurableTier, *, before: int) -> Position | None:
    """Return what is finished in the newest durable snapshot, of an earlier step, that has a manifest."""
    return next((manifest.position for manifest in tier.manifests() if manifest.step < before), None)

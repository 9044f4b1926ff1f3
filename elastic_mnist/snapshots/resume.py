"""The decision where a generation resumes.

Invariant: rank 0 alone decides, from what it can see of the durable tier and what each node offers of its memory tier;
all ranks get the decision, and the state by broadcast from the rank that has it. A run never starts afresh over another
run's snapshots, and never continues under settings that change its result unless they were accepted.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NoReturn

from elastic_mnist.errors import StoreError, UsageError
from elastic_mnist.settings import disagreements
from elastic_mnist.snapshots.durable import DurableTier, Snapshot
from elastic_mnist.snapshots.holder import LeaseHolder
from elastic_mnist.snapshots.lease import Lease
from elastic_mnist.snapshots.manifest import Manifest
from elastic_mnist.snapshots.progress import ProgressFile
from elastic_mnist.snapshots.record import RunRecord
from elastic_mnist.snapshots.resume_sources import Candidate, ResumeSource, SourceKind, find_source
from elastic_mnist.snapshots.run_config import RunConfig, StartRequest, agree, differences
from elastic_mnist.snapshots.state import State, unpack
from elastic_mnist.snapshots.storage import Storage
from elastic_mnist.telemetry.events import log
from elastic_mnist.training.sampler import Position

_ORDER: Final = ("dataset", "train_samples", "data_sha256", "seed")
"""The fields of the run's configuration that decide on the order of an epoch's samples."""

MAX_STALLED: Final = 3
"""More failures at one and the same step are no accident."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """What all ranks of a generation know before its first step.

    Attributes:
        record: the run, as this generation has recorded it.
        must_match: what all ranks must have been started with, as rank 0 was.
        source: where the state comes from.
        path: of the snapshot; None for a fresh start and for memory.
        num_lost_steps: steps that the generation before made and this one must make again; None: not known.
        saved: what is finished in the newest durable snapshot of the run; None where there is none.
        finished: the manifest of the final snapshot, where nothing is left to do.
        state_rank: the rank that has the state's bytes; None where there are none.
        data: the state's bytes; None where there are none, and until `state_rank` has sent them.
        lease: rank 0's on the snapshot path; None at other ranks.
    """

    record: RunRecord
    must_match: Mapping[str, Any]
    source: SourceKind
    path: str | None = None
    num_lost_steps: int | None = 0
    saved: Position | None = None
    finished: Manifest | None = None
    state_rank: int | None = None
    data: bytes | None = None
    lease: Lease | None = field(default=None, compare=False)

    def state(self) -> State | None:
        """Return the state to resume from, None for a fresh start."""
        return None if self.data is None else unpack(self.data)

    def for_broadcast(self) -> "Start":
        """Return the decision as rank 0 sends it: without the state, which is sent next, and without the lease."""
        return replace(self, data=None, lease=None)


def decide(
    storage: Storage,
    tier: DurableTier,
    request: StartRequest,
    *,
    holder: LeaseHolder,
    progress_path: Path,
    candidates: Sequence[Candidate] = (),
    on_decided: Callable[[RunRecord], None] = lambda _: None,
) -> Start:
    """Decide on rank 0, and acquire the lease where there is something to do.

    Args:
        storage: the place of the snapshots.
        tier: the durable snapshots there.
        request: what this generation was started with.
        holder: the launch that it belongs to.
        progress_path: of the progress file.
        candidates: what the nodes' memory tiers hold.
        on_decided: called with the generation's record before the lease is acquired.

    Raises:
        UsageError: the snapshots are another job's, or cannot be read or written; or to continue is of no use.
    """
    etag, source = find_source(storage, tier, request, holder, candidates)
    start = Start(
        record=_record_of(source, request, storage.location),
        must_match=request.must_match,
        source=source.kind,
        path=source.path,
        saved=source.saved,
        state_rank=source.state_rank,
        data=None if source.snapshot is None else source.snapshot.data,
    )
    if source.record is not None:
        is_done = source.record.is_finished and source.position.epoch >= request.settings.epochs
        if is_done and source.kind == "storage" and source.snapshot is not None:
            finished = source.snapshot.manifest
            return replace(start, record=source.record, state_rank=None, data=None, finished=finished)
        record, num_lost_steps = next_generation(
            source.record, start.record.contract, source.position, holder, progress_path
        )
        start = replace(start, record=record, num_lost_steps=num_lost_steps)
    record = replace(start.record, holder=holder, began_at=source.position.step)
    if record.num_stalled >= MAX_STALLED:
        _give_up(record, storage, etag)
    on_decided(record)
    return replace(start, record=record, lease=_acquire(storage, record, etag, may_wait=source.kind == "memory"))


def check_same_settings(start: Start, must_match: Mapping[str, Any]) -> None:
    """Raise `UsageError` where this rank was started with other settings than rank 0."""
    texts = disagreements(must_match, start.must_match, "at rank 0")
    if texts:
        raise UsageError(f"settings differ between the nodes: {texts}; start all nodes with the same options")


def next_generation(
    recorded: RunRecord, config: RunConfig, position: Position, holder: LeaseHolder, progress_path: Path
) -> tuple[RunRecord, int | None]:
    """Return the record of the next generation of a run, and the number of lost steps, None where it is not known.

    A generation is stalled that failed at the step where the one before had failed. One that was stopped has not
    failed: it counts for nothing, or, where it got further, as the end of a stall. So does another launch.
    """
    progress = ProgressFile.read(progress_path, recorded)
    num_lost_steps = None if progress is None else max(0, progress.step - position.step)
    record = recorded.next_generation(num_lost_steps=num_lost_steps or 0, contract=config)
    if progress is not None:
        reached: int | None = progress.step
    else:  # it may have failed before it could write its progress
        reached = position.step if position.step == recorded.began_at else None
    is_stopped = progress is not None and progress.is_stopped
    if recorded.holder.job_id != holder.job_id or (is_stopped and reached != recorded.began_at):
        record = replace(record, reached=None, num_stalled=0)
    elif reached is not None and not is_stopped:
        num_stalled = recorded.num_stalled + 1 if reached == recorded.reached else 0
        record = replace(record, reached=reached, num_stalled=num_stalled)
    return record, num_lost_steps


def _record_of(source: ResumeSource, request: StartRequest, location: str) -> RunRecord:
    """Return the record of a run that begins with a source, under the configuration to continue with.

    Raises:
        UsageError: the settings change the result, and that was not accepted or cannot be.
    """
    if source.config is None:
        config = request.new_config()
    else:
        config = agree(source.config, request, where=source.path or location)
        if source.snapshot is not None:
            _check_order(config, source.snapshot, request)
        if config != source.config:
            log.warning("run.settings_changed", changed=differences(source.config, request.config))
    resumed_from = source.path if source.kind == "file" else None
    return RunRecord.new(config, started_at=time.time(), resumed_from=resumed_from)


def _check_order(config: RunConfig, found: Snapshot, request: StartRequest) -> None:
    """Refuse another order of samples in the middle of an epoch: "each sample once" would have no meaning."""
    made_under: Mapping[str, Any] = {"train_samples": request.config["train_samples"], **found.state["contract"]}
    wanted: Mapping[str, Any] = {**config}
    if not found.state["samples_in_epoch"]:
        return
    if found.state["samples_in_epoch"] >= made_under["train_samples"]:
        raise UsageError(f"{found.path}: samples_in_epoch lies beyond the epoch's end; name another snapshot")
    changed = [name for name in _ORDER if made_under.get(name) != wanted[name]]
    if changed:
        raise UsageError(
            f"{found.path} lies in the middle of an epoch, where {' and '.join(changed)} cannot change, not even with "
            f"--accept_changes; change it at the end of an epoch"
        )


def _acquire(storage: Storage, record: RunRecord, etag: str | None, *, may_wait: bool) -> Lease:
    """Acquire the lease; where it `may_wait` and the store is away, the next durable snapshot will do it."""
    lease = Lease(storage, record, etag)
    try:
        storage.create()
        lease.acquire()
    except StoreError as error:
        if not may_wait:
            raise
        log.warning("snapshot.store_unreachable", reason=str(error))
    return lease


def _give_up(record: RunRecord, storage: Storage, etag: str | None) -> NoReturn:
    """Raise `UsageError`: the last generations of this launch have all failed at the same step."""
    reason = f"{record.num_stalled + 1} generations in a row have ended at step {record.reached}"
    # Started again, it may try as often again: a launch does not always have a name of its own.
    _acquire(storage, replace(record, num_stalled=0, reached=None, began_at=None), etag, may_wait=True)
    raise UsageError(f"{reason}; the event log and the output above say why. Put it right, and start the job again")

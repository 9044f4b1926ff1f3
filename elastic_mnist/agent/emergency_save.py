"""What an agent saves itself, because it ends and its workers could not: the state in its node's memory.

The memory ends with the agent. A worker that hangs when it is asked to stop, one that was just killed and is not
replaced any more, a launch whose restarts are used up, a rendezvous whose host is gone: in all these cases the newest
state is there, and perhaps nowhere else.

Invariant: an agent saves under the newest claim of its job. It is the one whose worker made that claim, and another one
only where that one has not saved within some seconds, or is seen to be dead.
"""

import threading
import time
from enum import Enum
from typing import Final

from elastic_mnist.errors import Fenced, StoreConflict, UsageError, print_message
from elastic_mnist.ipc import processes
from elastic_mnist.settings import Settings
from elastic_mnist.snapshots import memory
from elastic_mnist.snapshots import record as run_record
from elastic_mnist.snapshots.durable import DurableTier, Snapshot
from elastic_mnist.snapshots.lease import Lease
from elastic_mnist.snapshots.memory import MemorySnapshot
from elastic_mnist.snapshots.record import RunRecord
from elastic_mnist.snapshots.state import position_of
from elastic_mnist.snapshots.storage import open_storage
from elastic_mnist.telemetry import events

_RESCUE_SECONDS: Final = 60.0

_HOLDER_SECONDS: Final = 10.0
"""What the agent that has the claim needs to save. It was asked to stop at about the same moment, but where its workers
hang it waits for them until 30 s have passed, and those of another node may have given up after 25 (see `signals`)."""

_LOOK_SECONDS: Final = 0.5
_NUM_CONFLICTS: Final = 10


class Outcome(Enum):
    """What became of what a node's memory holds."""

    EMPTY = "there was nothing"
    SAFE = "it is in a snapshot, or a newer generation has more"
    LOST = "it could not be saved, which people were told"

    @property
    def is_empty(self) -> bool:
        """Whether there was nothing."""
        return self is Outcome.EMPTY

    @property
    def is_safe(self) -> bool:
        """Whether there was something, and it is safe."""
        return self is Outcome.SAFE


def rescue(memory_path: str, settings: Settings, *, reason: str | None, stands_in: bool) -> Outcome:
    """Save what a node's memory holds, in bounded time; say where that fails.

    Args:
        memory_path: leads to the memory.
        settings: of the job.
        reason: of the stop that is told as the workers would; None where it is none.
        stands_in: whether to wait for the agent that has the claim, and to save in its place where it does not.
    """
    outcomes: list[Outcome] = []
    errors: list[Exception] = []

    def save() -> None:
        try:
            outcomes.append(save_held(memory_path, settings, reason=reason, stands_in=stands_in))
        except Exception as error:  # noqa: BLE001 - carried to the main thread, whatever it is
            errors.append(error)

    thread = threading.Thread(target=save, name="rescue", daemon=True)
    thread.start()  # a store may hang for ever, and an agent that ends must not
    thread.join(_RESCUE_SECONDS)
    for outcome in outcomes:
        return outcome
    why = str(errors[0]) if errors else f"not within {_RESCUE_SECONDS:.0f} s"
    print_message(f"warning: what the node's memory holds cannot be saved: {why}")
    return Outcome.LOST


def save_held(
    memory_path: str,
    settings: Settings,
    *,
    reason: str | None,
    stands_in: bool = True,
    holder_seconds: float = _HOLDER_SECONDS,
) -> Outcome:
    """Save what a node's memory holds, unless a snapshot has it.

    Args:
        memory_path: leads to the memory.
        settings: of the job.
        reason: of the stop that is told as the workers would; None where it is none.
        stands_in: whether to save in the place of the agent that has the claim, where that one may be alive.
        holder_seconds: how long to wait for it then.

    Raises:
        UsageError: it cannot be saved.
        TrainingError: it must not be saved.
    """
    held = memory.read(memory_path)
    if held is None:
        return Outcome.EMPTY
    own = processes.own()
    if not stands_in and not held.record.holder.is_process(own) and not held.record.holder.is_seen_dead:
        return Outcome.SAFE  # others are at work, and have it
    storage = open_storage(settings.snapshot_path)
    recorded = run_record.read(storage)
    record = _claim_to_use(held.record, recorded)
    is_holder, is_dead = record.holder.is_process(own), record.holder.is_seen_dead
    if not is_holder and recorded is None:
        raise UsageError(f"{storage.location}: run {record.run_id} is not recorded there; its snapshots lie elsewhere")
    world_size = held.state["world_size"]
    events.configure(settings.event_log_path, rank=0, world_size=world_size, log_format=settings.log_format)
    events.identify(run_id=held.record.run_id, generation=held.record.generation)
    # Another agent removes nothing that the holder may need, and nobody sets aside what may be another's.
    keep_last, is_own = settings.keep_last if is_holder else None, is_holder and record == recorded
    tier = DurableTier(storage, keep_last=keep_last)
    look = tier if is_own else DurableTier(storage, read_only=True)
    patience = 0.0 if is_holder or is_dead else holder_seconds
    try:
        saved_by_others = _save(held, look, tier, Lease(storage, record, None), patience)
    except Fenced:
        return Outcome.SAFE
    position, path = held.position, tier.path(held.position.step)
    if saved_by_others is not None:
        position, path = position_of(saved_by_others.state), saved_by_others.path
    if reason is not None and (is_holder or saved_by_others is None):  # one agent tells
        events.log.info("run.stopped", reason=reason, **vars(position), path=path)
    return Outcome.SAFE


def _save(held: MemorySnapshot, look: DurableTier, tier: DurableTier, claim: Lease, patience: float) -> Snapshot | None:
    """Save what is held; return the snapshot that has it already, or has more, where there is one.

    Args:
        held: what is held.
        look: where to look for such a snapshot.
        tier: where to save.
        claim: under which it is saved.
        patience: seconds to wait for the holder's snapshot.
    """
    deadline, num_conflicts, seen = time.monotonic() + patience, 0, None
    while True:
        names = look.names()
        if names != seen:  # or what is damaged would be told at each look
            seen, newest = names, look.newest_valid(after=held.position.step - 1)
            if newest is not None and newest.state["run_id"] == held.record.run_id:
                return newest
        if time.monotonic() >= deadline:
            try:
                tier.save_state(held.state, claim.check)
            except StoreConflict:  # another agent is at it as well
                num_conflicts += 1
                if num_conflicts > _NUM_CONFLICTS:
                    raise
            else:
                return None
        time.sleep(_LOOK_SECONDS)


def _claim_to_use(held: RunRecord, recorded: RunRecord | None) -> RunRecord:
    """Return the claim under which to save what is held.

    It is a later one than that of what is held, where its generation died before its first step, and has left no state:
    one of this agent's own workers, or of a worker of this job whose agent is seen to be dead.
    """
    if recorded is None or recorded.run_id != held.run_id or recorded.generation <= held.generation:
        return held
    is_same_job = recorded.holder.job_id == held.holder.job_id
    is_over = recorded.holder.is_process(processes.own()) or (is_same_job and recorded.holder.is_seen_dead)
    return recorded if is_over else held

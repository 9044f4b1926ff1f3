"""What an agent saves itself, because it ends and its workers could not: the state in its node's memory.

The memory ends with the agent. A worker that hangs when it is asked to stop, one that was just killed and is not
replaced any more, a launch whose restarts are used up, a rendezvous whose host is gone: in all these cases the newest
state is there, and perhaps nowhere else.

Invariant: one agent at a time saves, and under the newest claim of its job. It is the one whose worker made that claim,
and another one only where that one has not saved within some seconds, or is seen to be dead.
"""

import threading
import time
from enum import Enum
from typing import Final

from elastic_mnist import events, processes
from elastic_mnist.errors import Fenced, say
from elastic_mnist.settings import Settings
from elastic_mnist.snapshots import memory
from elastic_mnist.snapshots import record as run_record
from elastic_mnist.snapshots.claim import Claim, is_held_by, is_seen_dead
from elastic_mnist.snapshots.durable import DurableTier, Snapshot
from elastic_mnist.snapshots.memory import Held
from elastic_mnist.snapshots.record import RunRecord
from elastic_mnist.snapshots.state import position_of
from elastic_mnist.snapshots.storage import Storage, open_storage

_RESCUE_SECONDS: Final = 60.0

_HOLDER_SECONDS: Final = 5.0
"""What the agent that has the claim needs to save; it was asked to stop at about the same moment."""

_LOOK_SECONDS: Final = 0.5


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


def rescue(memory_path: str, settings: Settings, *, reason: str | None) -> Outcome:
    """Save what a node's memory holds, in bounded time; say where that fails.

    Args:
        memory_path: leads to the memory.
        settings: of the job.
        reason: of the stop that is told as the workers would; None where it is none.
    """
    outcomes: list[Outcome] = []
    errors: list[Exception] = []

    def save() -> None:
        try:
            outcomes.append(save_held(memory_path, settings, reason=reason))
        except Exception as error:  # noqa: BLE001 - carried to the main thread, whatever it is
            errors.append(error)

    thread = threading.Thread(target=save, name="rescue", daemon=True)
    thread.start()  # a store may hang for ever, and an agent that ends must not
    thread.join(_RESCUE_SECONDS)
    for outcome in outcomes:
        return outcome
    why = str(errors[0]) if errors else f"not within {_RESCUE_SECONDS:.0f} s"
    say(f"warning: what the node's memory holds cannot be saved: {why}")
    return Outcome.LOST


def save_held(
    memory_path: str, settings: Settings, *, reason: str | None, holder_seconds: float = _HOLDER_SECONDS
) -> Outcome:
    """Save what a node's memory holds, unless a snapshot has it.

    Args:
        memory_path: leads to the memory.
        settings: of the job.
        reason: of the stop that is told as the workers would; None where it is none.
        holder_seconds: how long to wait for the agent whose worker has the claim.

    Raises:
        UsageError: it cannot be saved.
        TrainingError: it must not be saved.
    """
    held = memory.read(memory_path)
    if held is None:
        return Outcome.EMPTY
    storage = open_storage(settings.snapshot_path)
    world_size = held.state["world_size"]
    events.configure(settings.event_log_path, rank=0, world_size=world_size, log_format=settings.log_format)
    events.identify(run_id=held.record.run_id, generation=held.record.generation)
    record = _latest_own(held.record, run_record.read(storage))
    is_holder = is_held_by(record.holder, processes.own())
    if is_holder or is_seen_dead(record.holder):
        holder_seconds = 0.0
    try:
        there = _await_snapshot(storage, held, holder_seconds)
        if there is not None:
            position, path = position_of(there.state), there.path
        else:  # one that is not the holder's removes nothing: the holder may be about to save
            tier = DurableTier(storage, keep_last=settings.keep_last if is_holder else None)
            tier.save_state(held.state, Claim(storage, record, None).check)
            position, path = held.position, tier.path(held.position.step)
    except Fenced:
        return Outcome.SAFE
    if reason is not None and (is_holder or there is None):  # one agent tells
        events.log.info("run.stopped", reason=reason, **vars(position), path=path)
    return Outcome.SAFE


def _latest_own(held: RunRecord, recorded: RunRecord | None) -> RunRecord:
    """Return the latest claim of this agent's workers: one that died before its first step has left no state."""
    is_own = (
        recorded is not None
        and (recorded.run_id, recorded.generation > held.generation) == (held.run_id, True)
        and is_held_by(recorded.holder, processes.own())
    )
    return recorded if recorded is not None and is_own else held


def _await_snapshot(storage: Storage, held: Held, seconds: float) -> Snapshot | None:
    """Return the snapshot that has what is held, or more; None where there is none after some seconds."""
    tier, deadline = DurableTier(storage, read_only=True), time.monotonic() + seconds
    while True:
        newest = tier.newest_valid(after=held.position.step - 1)
        if newest is not None and newest.state["run_id"] == held.record.run_id:
            return newest
        if time.monotonic() >= deadline:
            return None
        time.sleep(_LOOK_SECONDS)

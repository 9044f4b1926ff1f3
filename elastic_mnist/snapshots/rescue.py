"""What an agent saves itself, because it ends and its workers could not: the state in its node's memory.

The memory ends with the agent. A worker that hangs when it is asked to stop, one that was just killed and is not
replaced any more, a launch whose restarts are used up: in all these cases the newest state is there and nowhere else.

Invariant: of all agents, the one alone saves whose worker has the claim on the place of the snapshots.
"""

import threading
from typing import Final

from elastic_mnist import events, processes
from elastic_mnist.errors import Fenced, say
from elastic_mnist.settings import Settings
from elastic_mnist.snapshots import memory
from elastic_mnist.snapshots.claim import Claim, is_held_by
from elastic_mnist.snapshots.durable import DurableTier
from elastic_mnist.snapshots.state import position_of
from elastic_mnist.snapshots.storage import open_storage

_RESCUE_SECONDS: Final = 60.0


def rescue(memory_path: str, settings: Settings, *, reason: str | None) -> bool:
    """Save what a node's memory holds, in bounded time; return whether it is safe then, and say where it is not.

    Args:
        memory_path: leads to the memory.
        settings: of the job.
        reason: of the stop that is told as the workers would; None where it is none.
    """
    outcomes: list[bool | Exception] = []

    def save() -> None:
        try:
            outcomes.append(save_held(memory_path, settings, reason=reason))
        except Exception as error:  # noqa: BLE001 - carried to the main thread, whatever it is
            outcomes.append(error)

    thread = threading.Thread(target=save, name="rescue", daemon=True)
    thread.start()  # a store may hang for ever, and an agent that ends must not
    thread.join(_RESCUE_SECONDS)
    outcome = outcomes[0] if outcomes else f"not within {_RESCUE_SECONDS:.0f} s"
    if isinstance(outcome, Fenced):
        return True  # a later generation has more
    if isinstance(outcome, bool):
        return outcome
    say(f"warning: what the node's memory holds cannot be saved: {outcome}")
    return False


def save_held(memory_path: str, settings: Settings, *, reason: str | None) -> bool:
    """Save what a node's memory holds, unless a snapshot has it; return whether it is safe then.

    Args:
        memory_path: leads to the memory.
        settings: of the job.
        reason: of the stop that is told as the workers would; None where it is none.

    Returns:
        False where the memory is empty. Where it is for another agent to save, it is safe as far as can be told here.

    Raises:
        UsageError: it cannot be saved.
        Fenced: a newer generation is at work.
    """
    held = memory.read(memory_path)
    if held is None:
        return False
    if not is_held_by(held.record.holder, processes.own()):
        return True
    storage = open_storage(settings.snapshot_path)
    tier = DurableTier(storage, keep_last=settings.keep_last)
    world_size = held.state["world_size"]
    events.configure(settings.event_log_path, rank=0, world_size=world_size, log_format=settings.log_format)
    events.identify(run_id=held.record.run_id, generation=held.record.generation)
    position, path = held.position, tier.path(held.position.step)
    newest = tier.newest_valid(after=position.step - 1)
    if newest is None:
        tier.save_state(held.state, Claim(storage, held.record, None).check)
    else:  # the same step, or one that came after what is kept only now and then
        position, path = position_of(newest.state), newest.path
    if reason is not None:
        events.log.info("run.stopped", reason=reason, **vars(position), path=path)
    return True

"""What an agent does for the workers of its node while it has some, and what it owes them at its end.

It holds their memory tier, watches over them (`warden`), holds signals while it starts them (`agent_signals`), and
saves what the memory holds where it ends and they have not saved it (`snapshots/rescue`).

The memory and the workers' table live in files without a name, which the kernel frees with the agent. A system that
has no such files has neither: there the job goes on from durable snapshots, and a worker that is stopped stays
unnoticed.
"""

import os
from typing import TYPE_CHECKING

from elastic_mnist.agent.signals import AgentSignals
from elastic_mnist.agent.watchdog import Watchdog
from elastic_mnist.ipc import environment
from elastic_mnist.settings import Settings

if TYPE_CHECKING:
    from elastic_mnist.agent.emergency_save import Outcome


class Node:
    """The workers of this agent's node, all generations of them.

    Construct it in the main thread; whatever workers start afterwards find its parts in their environment.

    Args:
        settings: the workers'.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._signals = AgentSignals()
        self._memory_path: str | None = None
        self._warden: Watchdog | None = None
        if hasattr(os, "memfd_create"):
            self._memory_path = f"/proc/{os.getpid()}/fd/{os.memfd_create('elastic_mnist')}"
            self._warden = Watchdog(hang_timeout=settings.hang_timeout, event_log=settings.event_log_path)
            os.environ[environment.MEMORY] = self._memory_path
            os.environ[environment.PULSE] = self._warden.path

    @property
    def is_refused(self) -> bool:
        """Whether a worker has said that starting it again is of no use."""
        return self._warden is not None and self._warden.is_refused

    @property
    def is_stopped_by_others(self) -> bool:
        """Whether the workers have stopped as they were asked to, and not by their agent alone."""
        return self._warden is not None and self._warden.is_stopped_by_others

    def let_signals_through(self) -> None:
        """Hold signals no longer; raises torchrun's `SignalException` where one has come meanwhile."""
        self._signals.release()

    def begin_generation(self) -> None:
        """Forget the workers of before, and hold signals until those that the agent is about to start are there."""
        self._signals.hold()
        if self._warden is not None:
            self._warden.begin_generation()
        self.announce(0)

    def announce(self, num_nodes_waiting: int) -> None:
        """Let the workers know how many nodes wait to join."""
        if self._warden is not None:
            self._warden.announce(num_nodes_waiting)

    def end(self) -> None:
        """Watch no longer, and tell of what has happened to the last workers: the agent has ended them all."""
        self._signals.forget()
        if self._warden is not None:
            self._warden.close()
            self._warden.tell_of_the_lost()

    def save(self, *, are_others_at_work: bool) -> None:
        """Save what the workers have not saved, where the agent ends though nobody asked for it.

        Args:
            are_others_at_work: whether the job goes on without this node, as far as can be seen. They wait for its end.
        """
        self._signals.ignore()
        self._rescue(reason=None, stands_in=not are_others_at_work)
        self._signals.heed()

    def stop(self, reason: str) -> bool:
        """Save what the workers have not saved, where the agent was asked to stop; return whether all of it is safe.

        Nothing is left to do for the agent then but to end: it hears no signal any more.

        Args:
            reason: of the stop, for the event log.
        """
        self._signals.ignore()
        if self._warden is None or self._warden.has_stopped:
            return True
        outcome = self._rescue(reason=f"{reason}; saved by the agent", stands_in=True)
        self._warden.tell_of_the_lost()
        return outcome.is_safe or (outcome.is_empty and not self._warden.has_trained)

    def _rescue(self, *, reason: str | None, stands_in: bool) -> "Outcome":
        """Save what the memory holds and no snapshot has; see `rescue`."""
        from elastic_mnist.agent.emergency_save import Outcome, rescue  # noqa: PLC0415 - no start has to pay for it

        if self._memory_path is None or os.stat(self._memory_path).st_size == 0:  # noqa: PTH116 - a Path reads the link
            return Outcome.EMPTY
        return rescue(self._memory_path, self._settings, reason=reason, stands_in=stands_in)

"""Who holds the lease on a place of snapshots: one launch of torchrun, or one plain process."""

import os
from dataclasses import dataclass

from elastic_mnist.ipc import processes
from elastic_mnist.ipc.environment import WorkerEnvironment


@dataclass(frozen=True, kw_only=True)
class LeaseHolder:
    """A launch, and the process that stands for it on one host; what an older record does not say has its default.

    Attributes:
        job_id: of the launch; the agents of one rendezvous have it in common.
        host: names a machine's boot and its space of process ids.
        pid: the agent, or the process itself where there is no agent.
        pid_started: the clock tick at which that process began; None where it is not known.
    """

    job_id: str = ""
    host: str = ""
    pid: int = 0
    pid_started: int | None = None

    @classmethod
    def of(cls, place: WorkerEnvironment) -> "LeaseHolder":
        """Return this process's launch."""
        pid = place.agent_pid or (os.getpid() if place.endpoint is None else os.getppid())
        host, started = processes.host(), processes.started(pid)
        return cls(job_id=place.job_id or f"{host} {pid} {started}", host=host, pid=pid, pid_started=started)

    def is_process(self, process: tuple[str, int, int | None]) -> bool:
        """Whether a process, given as host, id and beginning, stands for this launch."""
        return (self.host, self.pid, self.pid_started) == process

    @property
    def is_alive(self) -> bool:
        """Whether the process can be seen to be alive from here."""
        return (
            self.host == processes.host()
            and self.pid_started is not None
            and processes.started(self.pid) == self.pid_started
        )

    @property
    def is_seen_dead(self) -> bool:
        """Whether the process can be seen from here to be dead; one on another host cannot."""
        return self.host == processes.host() and not self.is_alive

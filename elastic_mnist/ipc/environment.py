"""What the launcher tells a worker: its place, and the names through which agent and worker speak.

Imports nothing heavy: a worker knows its place before it imports torch. The agent's side of this is
`rendezvous.py`; the two import this and nothing of each other.
"""

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from elastic_mnist.errors import UsageError

STORE_ENDPOINT: Final = "ELASTIC_MNIST_STORE"
"""HOST:PORT of the rendezvous' TCPStore, which outlives the workers."""

GENERATION_KEY: Final = "ELASTIC_MNIST_GENERATION_KEY"
"""A name that all workers of one generation share, and no other generation does."""

AGENT_PID: Final = "ELASTIC_MNIST_AGENT_PID"
"""The process id, on this host, of the agent that started this worker."""

ROUNDS_JOINED: Final = "ELASTIC_MNIST_SENIORITY"
"""Number of generations that the agent was part of before this one."""

JOB_ID: Final = "ELASTIC_MNIST_JOB_ID"
"""One launch: its agents have it in common."""

MEMORY: Final = "ELASTIC_MNIST_MEMORY"
"""A path to the memory that the agent holds for its node's memory tier; it ends with the agent."""

PULSE: Final = "ELASTIC_MNIST_PULSE"
"""A path to the table through which the agent and its workers speak: signs of life, and what else there is to say."""


@dataclass(frozen=True, kw_only=True)
class WorkerEnvironment:
    """This process's place among the workers, as the launcher set it in the environment.

    Attributes:
        endpoint: HOST and PORT of the store where the workers meet; None for a process on its own.
        is_hosted: whether an agent serves that store; else rank 0 does.
        generation_key: names this generation, where the agent says so.
        agent_pid: process id of the agent that started this process, where it says so.
        seniority: number of generations that the agent was part of before this one.
        restart_count: number of failures after which the agent has started its workers again.
        job_id: names the launch, where the agent says so.
        memory_path: leads to the memory that the agent holds, where it does.
        pulse_path: leads to the table that the agent watches, where it does.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    endpoint: tuple[str, int] | None = None
    is_hosted: bool = False
    generation_key: str | None = None
    agent_pid: int | None = None
    rounds_joined: int = 0
    restart_count: int = 0
    job_id: str | None = None
    memory_path: str | None = None
    pulse_path: str | None = None

    @property
    def is_first_attempt(self) -> bool:
        """Whether this node's workers have not been started before in this launch."""
        return self.rounds_joined == self.restart_count == 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "WorkerEnvironment":
        """Read torchrun's variables and those of the plug-in; without any, the process is on its own."""
        if "RANK" not in environment:
            return cls()
        try:
            shared = environment.get(STORE_ENDPOINT)
            host, _, port = (
                shared.rpartition(":") if shared else (environment["MASTER_ADDR"], "", environment["MASTER_PORT"])
            )
            place = cls(
                rank=int(environment["RANK"]),
                world_size=int(environment["WORLD_SIZE"]),
                local_rank=int(environment.get("LOCAL_RANK", "0")),
                local_world_size=int(environment.get("LOCAL_WORLD_SIZE", "1")),
                endpoint=(host, int(port)),
                is_hosted=shared is not None or environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
                generation_key=environment.get(GENERATION_KEY),
                agent_pid=int(environment[AGENT_PID]) if AGENT_PID in environment else None,
                rounds_joined=int(environment.get(ROUNDS_JOINED, "0")),
                restart_count=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
                job_id=environment.get(JOB_ID),
                memory_path=environment.get(MEMORY),
                pulse_path=environment.get(PULSE),
            )
        except (KeyError, ValueError) as error:
            raise UsageError(
                f"environment: RANK is set, but {error} does not fit; start with torchrun, or unset RANK"
            ) from None
        if not (0 <= place.rank < place.world_size and 0 <= place.local_rank < place.local_world_size):
            raise UsageError(
                f"environment: RANK {place.rank} of WORLD_SIZE {place.world_size}, LOCAL_RANK {place.local_rank} of "
                f"LOCAL_WORLD_SIZE {place.local_world_size} do not fit; start with torchrun, or unset RANK"
            )
        return place


STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)

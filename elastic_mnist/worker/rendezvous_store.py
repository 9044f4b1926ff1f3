"""The store that the ranks of one generation share: connection, namespace and rank numbers."""

import hashlib
import time
import uuid
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from elastic_mnist.errors import PeerLost
from elastic_mnist.ipc.environment import WorkerEnvironment

_POLL_SECONDS: Final = 0.02
_RESEND_SECONDS: Final = 0.5


def open_store(env: WorkerEnvironment, timeout: timedelta) -> tuple[dist.Store, str]:
    """Return a store that this generation's ranks alone use, and the generation's name there."""
    if env.endpoint is None:
        return dist.HashStore(), ""
    store = connect(env, timeout)
    key = env.generation_key or generation_handshake(store, env.rank, env.world_size, timeout)
    return dist.PrefixStore(f"elastic_mnist/{key}", store), key


def connect(env: WorkerEnvironment, timeout: timedelta, *, may_serve: bool = True) -> dist.TCPStore:
    """Connect to the workers' store; rank 0 serves it where no agent does."""
    assert env.endpoint is not None
    host, port = env.endpoint
    return dist.TCPStore(
        host,
        port,
        is_master=may_serve and env.rank == 0 and not env.is_hosted,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )


def generation_handshake(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a name that this generation's ranks agree on, in a store that may hold the keys of dead generations.

    Each rank writes a new id as its hello. Rank 0 writes the ids that it reads as the roster; a rank confirms only a
    roster with its own id, and the roster is valid when all ranks have confirmed it. No rank confirms a roster with a
    dead rank's id, and rank 0 reads the hellos again.
    """
    own_id, names = uuid.uuid4().hex, dist.PrefixStore("elastic_mnist/roster", store)
    names.set(f"hello/{rank}", own_id)
    deadline = time.monotonic() + timeout.total_seconds()
    hellos = [f"hello/{other}" for other in range(world_size)]
    while time.monotonic() < deadline:
        if rank == 0 and names.check(hellos):
            names.set("roster", " ".join(names.get(hello).decode() for hello in hellos))
        resend = time.monotonic() + _RESEND_SECONDS
        while time.monotonic() < resend:
            roster = names.get("roster").decode() if names.check(["roster"]) else ""
            if rank < len(roster.split()) and roster.split()[rank] == own_id and len(roster.split()) == world_size:
                key = hashlib.sha256(roster.encode()).hexdigest()
                names.set(f"{key}/{rank}", "here")
                if names.check([f"{key}/{other}" for other in range(world_size)]):
                    return key
            time.sleep(_POLL_SECONDS)
    raise PeerLost(f"meeting: not all of the {world_size} ranks came within {timeout.total_seconds():.0f} s")


def assign_rank(store: dist.Store, env: WorkerEnvironment) -> int:
    """Return this process's global rank: the longest-serving node's ranks first, else as the launcher numbered them.

    The launcher numbers nodes by address and process id. A node that has just joined could be the first of them, and
    would decide where the job resumes from what it alone can see.
    """
    store.set(f"seat/{env.rank}", str(env.rounds_joined))
    rounds = [int(store.get(f"seat/{rank}")) for rank in range(env.world_size)]
    return sorted(range(env.world_size), key=lambda rank: (-rounds[rank], rank)).index(env.rank)

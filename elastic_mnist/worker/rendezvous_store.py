"""The store where the ranks of one generation meet: connection, namespace and rank numbers."""

import hashlib
import time
import uuid
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from elastic_mnist.errors import PeerLost
from elastic_mnist.ipc import environment

_POLL_SECONDS: Final = 0.02


_RESEND_SECONDS: Final = 0.5


def open_store(place: environment.WorkerEnvironment, timeout: timedelta) -> tuple[dist.Store, str]:
    """Return a store that this generation's ranks alone use, and the generation's name there."""
    if place.endpoint is None:
        return dist.HashStore(), ""
    store = connect(place, timeout)
    key = place.generation_key or generation_handshake(store, place.rank, place.world_size, timeout)
    return dist.PrefixStore(f"elastic_mnist/{key}", store), key


def connect(place: environment.WorkerEnvironment, timeout: timedelta, *, may_serve: bool = True) -> dist.TCPStore:
    """Connect to the store where the workers meet, or serve it where no agent does."""
    assert place.endpoint is not None
    host, port = place.endpoint
    return dist.TCPStore(
        host,
        port,
        is_master=may_serve and place.rank == 0 and not place.is_hosted,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )


def generation_handshake(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Agree on a name for this generation, in a store that may still hold the words of dead ones.

    Each rank says hello with a fresh id. Rank 0 puts the ids it sees on a roster; a rank answers only to a
    roster with its own fresh id on it, and the roster stands when all have answered. If rank 0 has read a
    dead rank's hello, nobody answers for it; rank 0 looks again.
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


def assign_rank(store: dist.Store, place: environment.WorkerEnvironment) -> int:
    """Return this process's global rank: the longest-serving node's come first, else as the launcher numbered them.

    The launcher numbers nodes by address and process id. A node that has just come could be the first of them, and
    would decide, from what it alone can see, where a job goes on that others have been running.
    """
    store.set(f"seat/{place.rank}", str(place.rounds_joined))
    seniorities = [int(store.get(f"seat/{rank}")) for rank in range(place.world_size)]
    return sorted(range(place.world_size), key=lambda rank: (-seniorities[rank], rank)).index(place.rank)

"""Who takes part in this generation: the process group, and how its ranks agree.

Invariant: the ranks of one generation meet in a namespace of the store that no other generation uses.
Workers of torchrun share the agent's store over restarts, and what they read of a dead generation are
addresses where nobody listens.

Every collective goes through `World` or under its `guard`, and raises `PeerLost` when a rank is gone.
"""

import contextlib
import hashlib
import os
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Final, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_mnist.errors import EXIT_FAILURE, PeerLost, UsageError
from elastic_mnist.ipc import environment
from elastic_mnist.ipc.heartbeat import PARTING, WAITING, Stillness, heart
from elastic_mnist.telemetry.events import log

_POLL_SECONDS: Final = 0.02
_RESEND_SECONDS: Final = 0.5

_BACKSTOP: Final = timedelta(days=1)
"""A collective waits for a slow peer for as long as it lives; whether it does is for `PeerWatch` to tell."""

_ANSWER_SECONDS: Final = 5.0
_OTHERS_SECONDS: Final = 1.0


class World:
    """The ranks of one generation. Every rank must make the same calls in the same order.

    Args:
        place: this process's place.
        device: where its tensors are.
        timeout: seconds without a sign of life after which a peer counts as lost.
        meeting_timeout: seconds within which all must have come; those just started may take their time.
    """

    def __init__(
        self, place: environment.Place, device: torch.device, *, timeout: float, meeting_timeout: float = 60.0
    ) -> None:
        self.size = place.world_size
        self.device = device
        self._timeout = timedelta(seconds=meeting_timeout)
        with guard("meeting"):
            self._store, self._key = _meet(place, self._timeout)
            self.rank = _take_seat(self._store, place)
            if self.size > 1:  # first, because a peer may be lost while they connect to each other
                PeerWatch(place, self.rank, timeout=timeout, key=self._key)
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=self._store, rank=self.rank, world_size=self.size, timeout=_BACKSTOP)

    def all_reduce(self, tensor: Tensor) -> None:
        """Add `tensor` up over all ranks, in place."""
        if self.size > 1:
            with guard("all-reduce"):
                dist.all_reduce(tensor)
                if tensor.is_cuda:  # NCCL returns at once; it is here that one waits, and here that a loss is noticed
                    torch.cuda.synchronize(tensor.device)

    def gather(self, name: str, text: str) -> list[str]:
        """Return the short texts that the ranks say under a name of its own, in their order; empty but at rank 0."""
        with guard(f"gathering of {name}"):
            self._store.set(f"{name}/{self.rank}", text)
            ranks = range(self.size) if self.rank == 0 else ()
            return [self._store.get(f"{name}/{rank}").decode() for rank in ranks]

    def broadcast(self, payload: bytes | None, *, source: int = 0) -> bytes:
        """Send the `payload` of rank `source` to all ranks, which pass None; checked against its digest.

        Raises:
            PeerLost: a rank is gone, or what arrived is not what was sent.
        """
        if self.size == 1:
            assert payload is not None
            return payload
        header = torch.zeros(40, dtype=torch.uint8)
        if payload is not None:
            head = len(payload).to_bytes(8, "little") + hashlib.sha256(payload).digest()
            header = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        with guard("broadcast"):
            dist.broadcast(header, src=source)
            head = header.numpy().tobytes()
            size = int.from_bytes(head[:8], "little")
            body = (
                torch.frombuffer(bytearray(payload), dtype=torch.uint8)
                if payload
                else torch.empty(size, dtype=torch.uint8)
            )
            dist.broadcast(body, src=source)
        received = body.numpy().tobytes()
        if hashlib.sha256(received).digest() != head[8:]:
            raise PeerLost(f"broadcast: the {size:,} bytes that arrived are not those that rank {source} sent")
        return received

    def part(self) -> None:
        """Wait for rank 0, which may still be writing, however long that takes; and rank 0 for all others to know."""
        if self.size == 1:
            return
        with guard("parting"), heart.phase(PARTING):
            dist.broadcast(torch.zeros(1, dtype=torch.uint8), src=0)  # a rank 0 that is gone is noticed at once
            self._store.set(f"parted/{self.rank}", "")
            for rank in range(1, self.size) if self.rank == 0 else ():  # it may be the one that serves the store
                self._store.get(f"parted/{rank}")

    def wrap(self, model: nn.Module) -> nn.parallel.DistributedDataParallel:
        """Wrap `model` in DDP, which gives all ranks rank 0's parameters."""
        with guard("broadcast of the initial weights"):
            ids = [self.device] if self.device.type == "cuda" else None
            return nn.parallel.DistributedDataParallel(model, device_ids=ids)

    def leave(self) -> None:
        """End the process group, in order."""
        dist.destroy_process_group()


def choose_device(name: str, local_rank: int) -> torch.device:
    """Return the device that `--device` asks for, one CUDA device a local rank."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device here; use --device cpu")
    if local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"--device {name}: local rank {local_rank} has no CUDA device of its own, there are "
            f"{torch.cuda.device_count()}; start fewer processes or use --device cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


class PeerWatch:
    """Notices a peer that gives no sign of life, and ends this process: a collective would wait for it for ever.

    Each process leaves its signs in the store, from a thread of its own, because a store that does not answer must not
    hold up anything else. The peers' signs are looked at only while this process waits for them.

    Args:
        place: leads to the store.
        rank: of this process.
        timeout: seconds without a sign of life after which a peer counts as lost.
        key: names the generation.
    """

    def __init__(self, place: environment.Place, rank: int, *, timeout: float, key: str) -> None:
        self._place = place
        self._rank = rank
        self._timeout = timeout
        self._interval = min(1.0, timeout / 10)
        self._prefix = f"elastic_mnist/{key}/pulse"
        self._store: dist.Store | None = None
        self._num_beats = 0
        peers = [peer for peer in range(place.world_size) if peer != rank]
        self._peers = {peer: Stillness(gap_seconds=2 * _ANSWER_SECONDS) for peer in peers}
        self._answered_at = time.monotonic()
        threading.Thread(target=self._watch, name="peers", daemon=True).start()
        heart.checks.append(self._check_silence)

    def _watch(self) -> None:
        while True:
            try:
                self._look(heart.waiting_seconds())
                self._answered_at = time.monotonic()
            except RuntimeError:  # torch's DistError and its kin
                self._store = None
            time.sleep(self._interval)

    def _check_silence(self) -> None:
        """End where the store itself has gone silent. Asking it may take for ever, so another thread looks at that."""
        silence = time.monotonic() - self._answered_at
        if min(silence, heart.waiting_seconds()) > heart.patience(self._timeout) + _OTHERS_SECONDS:
            self._end(f"the store has not answered for {silence:.0f} s")

    def _look(self, waiting_seconds: float) -> None:
        """Leave a sign; where this process has been waiting, look at its peers'."""
        patience = heart.patience(self._timeout)
        is_stuck = waiting_seconds > patience
        self._num_beats += 1
        if self._store is None:
            store = _connect(self._place, timedelta(seconds=_ANSWER_SECONDS), may_serve=False)
            self._store = dist.PrefixStore(self._prefix, store)
        self._store.set(str(self._rank), f"{self._num_beats} {int(is_stuck)}")
        if waiting_seconds <= self._interval:
            return
        keys = [str(peer) for peer in self._peers if self._store.check([str(peer)])]
        signs = dict(zip(keys, self._store.multi_get(keys), strict=True)) if keys else {}
        are_stuck = [is_stuck]
        for peer, stillness in self._peers.items():
            beats, is_peer_stuck = signs.get(str(peer), b"0 0").split()
            are_stuck.append(is_peer_stuck == b"1")
            seconds = stillness.seconds(beats)
            # A second more than the peer's own agent, which can tell more of it.
            if seconds > patience + _OTHERS_SECONDS:
                self._end(f"rank {peer} has given no sign of life for {seconds:.0f} s")
        if all(are_stuck):
            self._end(f"all ranks are alive and have waited for each other for {waiting_seconds:.0f} s")

    def _end(self, reason: str) -> NoReturn:
        try:
            log.warning("peer.hung", reason=reason, step=heart.step)
        finally:
            heart.end()
            os._exit(EXIT_FAILURE)


def _meet(place: environment.Place, timeout: timedelta) -> tuple[dist.Store, str]:
    """Return a store that this generation's ranks alone use, and the generation's name there."""
    if place.endpoint is None:
        return dist.HashStore(), ""
    store = _connect(place, timeout)
    key = place.generation_key or _agree_on_key(store, place.rank, place.world_size, timeout)
    return dist.PrefixStore(f"elastic_mnist/{key}", store), key


def _connect(place: environment.Place, timeout: timedelta, *, may_serve: bool = True) -> dist.TCPStore:
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


def _agree_on_key(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
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


def _take_seat(store: dist.Store, place: environment.Place) -> int:
    """Return this process's global rank: the longest-serving node's come first, else as the launcher numbered them.

    The launcher numbers nodes by address and process id. A node that has just come could be the first of them, and
    would decide, from what it alone can see, where a job goes on that others have been running.
    """
    store.set(f"seat/{place.rank}", str(place.seniority))
    seniorities = [int(store.get(f"seat/{rank}")) for rank in range(place.world_size)]
    return sorted(range(place.world_size), key=lambda rank: (-seniorities[rank], rank)).index(place.rank)


@contextlib.contextmanager
def guard(what: str) -> Iterator[None]:
    """Wait for peers: say so meanwhile, and turn what torch raises when one of them is gone into `PeerLost`."""
    try:
        with heart.phase(WAITING):
            yield
    except torch.OutOfMemoryError:  # this process's own trouble
        raise
    except RuntimeError as error:  # also torch's DistError and its kin
        reason = str(error).splitlines()[0][:300]
        raise PeerLost(f"{what}: {reason}") from error

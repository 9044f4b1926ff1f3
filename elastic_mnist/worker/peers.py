"""A worker's watch over its peers, while it waits for them in a collective."""

import os
import time
from datetime import timedelta
from typing import Final, NoReturn

import torch.distributed as dist

from elastic_mnist.errors import EXIT_FAILURE
from elastic_mnist.ipc.environment import WorkerEnvironment
from elastic_mnist.ipc.timers import PeriodicThread, StallTimer
from elastic_mnist.telemetry.events import log
from elastic_mnist.worker.heartbeat import heartbeat_writer
from elastic_mnist.worker.rendezvous_store import connect

_ANSWER_SECONDS: Final = 5.0
"""The store must answer within this time."""

_AGENT_FIRST_SECONDS: Final = 1.0
"""A peer's own agent can log more about it, so it gets this much more time."""


class PeerWatch:
    """Ends this process where a peer has no heartbeat: a collective would wait for it without end.

    Each process writes its heartbeat to the store, in a thread of its own: a store that does not answer must not hold
    up anything else. The peers' heartbeats are read only while this process waits for them.

    Args:
        env: of this process; it names the store.
        rank: of this process.
        timeout: seconds without a heartbeat after which a peer counts as lost.
        key: names the generation.
    """

    def __init__(self, env: WorkerEnvironment, rank: int, *, timeout: float, key: str) -> None:
        self._env = env
        self._rank = rank
        self._timeout = timeout
        self._interval = min(1.0, timeout / 10)
        self._prefix = f"elastic_mnist/{key}/pulse"
        self._store: dist.Store | None = None
        self._num_beats = 0
        peers = [peer for peer in range(env.world_size) if peer != rank]
        self._peers = {peer: StallTimer(gap_seconds=2 * _ANSWER_SECONDS) for peer in peers}
        self._answered_at = time.monotonic()
        PeriodicThread("peers", self._interval, self._watch).start()
        heartbeat_writer.checks.append(self._check_store)

    def _watch(self) -> None:
        try:
            self._exchange(heartbeat_writer.waiting_seconds())
            self._answered_at = time.monotonic()
        except RuntimeError:  # torch's DistError and its subclasses
            self._store = None

    def _check_store(self) -> None:
        """Exit where the store does not answer; in another thread, because a request to it may never return."""
        silence = time.monotonic() - self._answered_at
        limit = heartbeat_writer.patience(self._timeout) + _AGENT_FIRST_SECONDS
        if min(silence, heartbeat_writer.waiting_seconds()) > limit:
            self._exit(f"the store has not answered for {silence:.0f} s")

    def _exchange(self, waiting_seconds: float) -> None:
        """Write a heartbeat; read the peers' where this process has been waiting."""
        patience = heartbeat_writer.patience(self._timeout)
        is_stuck = waiting_seconds > patience
        self._num_beats += 1
        if self._store is None:
            store = connect(self._env, timedelta(seconds=_ANSWER_SECONDS), may_serve=False)
            self._store = dist.PrefixStore(self._prefix, store)
        self._store.set(str(self._rank), f"{self._num_beats} {int(is_stuck)}")
        if waiting_seconds <= self._interval:
            return
        keys = [str(peer) for peer in self._peers if self._store.check([str(peer)])]
        heartbeats = dict(zip(keys, self._store.multi_get(keys), strict=True)) if keys else {}
        are_stuck = [is_stuck]
        for peer, stall_timer in self._peers.items():
            beats, is_peer_stuck = heartbeats.get(str(peer), b"0 0").split()
            are_stuck.append(is_peer_stuck == b"1")
            seconds = stall_timer.seconds(beats)
            if seconds > patience + _AGENT_FIRST_SECONDS:
                self._exit(f"rank {peer} has given no sign of life for {seconds:.0f} s")
        if all(are_stuck):
            self._exit(f"all ranks are alive and have waited for each other for {waiting_seconds:.0f} s")

    def _exit(self, reason: str) -> NoReturn:
        try:
            log.warning("peer.hung", reason=reason, step=heartbeat_writer.step)
        finally:
            heartbeat_writer.end()
            os._exit(EXIT_FAILURE)

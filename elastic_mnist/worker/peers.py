"""The watch of a worker over its peers, while it waits for them."""

import os
import threading
import time
from datetime import timedelta
from typing import Final, NoReturn

import torch.distributed as dist

from elastic_mnist.errors import EXIT_FAILURE
from elastic_mnist.ipc import environment
from elastic_mnist.ipc.timers import StallTimer
from elastic_mnist.telemetry.events import log
from elastic_mnist.worker.heartbeat import heartbeat_writer
from elastic_mnist.worker.rendezvous_store import connect

_ANSWER_SECONDS: Final = 5.0


_OTHERS_SECONDS: Final = 1.0


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

    def __init__(self, place: environment.WorkerEnvironment, rank: int, *, timeout: float, key: str) -> None:
        self._place = place
        self._rank = rank
        self._timeout = timeout
        self._interval = min(1.0, timeout / 10)
        self._prefix = f"elastic_mnist/{key}/pulse"
        self._store: dist.Store | None = None
        self._num_beats = 0
        peers = [peer for peer in range(place.world_size) if peer != rank]
        self._peers = {peer: StallTimer(gap_seconds=2 * _ANSWER_SECONDS) for peer in peers}
        self._answered_at = time.monotonic()
        threading.Thread(target=self._watch, name="peers", daemon=True).start()
        heartbeat_writer.checks.append(self._check_silence)

    def _watch(self) -> None:
        while True:
            try:
                self._look(heartbeat_writer.waiting_seconds())
                self._answered_at = time.monotonic()
            except RuntimeError:  # torch's DistError and its kin
                self._store = None
            time.sleep(self._interval)

    def _check_silence(self) -> None:
        """End where the store itself has gone silent. Asking it may take for ever, so another thread looks at that."""
        silence = time.monotonic() - self._answered_at
        if (
            min(silence, heartbeat_writer.waiting_seconds())
            > heartbeat_writer.patience(self._timeout) + _OTHERS_SECONDS
        ):
            self._end(f"the store has not answered for {silence:.0f} s")

    def _look(self, waiting_seconds: float) -> None:
        """Leave a sign; where this process has been waiting, look at its peers'."""
        patience = heartbeat_writer.patience(self._timeout)
        is_stuck = waiting_seconds > patience
        self._num_beats += 1
        if self._store is None:
            store = connect(self._place, timedelta(seconds=_ANSWER_SECONDS), may_serve=False)
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
            log.warning("peer.hung", reason=reason, step=heartbeat_writer.step)
        finally:
            heartbeat_writer.end()
            os._exit(EXIT_FAILURE)

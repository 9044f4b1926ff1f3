"""The agent's watch over the rendezvous' store: whether it answers at all.

A node that was cut off or stopped closes no connection, and torch's client waits for its answer for ever: the timeout
that it takes ends in a second wait, which has none. So one thread asks the store a trifle now and then, and another one
hangs up once an answer has been due for too long: whatever waits for the store in this process then ends with an error,
and so does the agent, in order.

A connection that breaks is another matter: whoever uses it is told by torch, and the watch makes itself a new one.

Imported by the agent alone.
"""

import contextlib
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Final

from torch.distributed import TCPStore

from elastic_mnist.ipc.timers import PeriodicThread, StallTimer

_ASK_SECONDS: Final = 1.0
_STOP_SECONDS: Final = 2.0


class StoreWatch:
    """Hangs up on a store that does not answer.

    Args:
        store: the agent's; it serves it, or is a client.
        patience_seconds: for an answer. A silence that is shorter is overcome by itself.
    """

    def __init__(self, store: TCPStore, *, patience_seconds: float) -> None:
        self._host, self._port = store.host, store.port
        self._patience_seconds = patience_seconds
        self._client: TCPStore | None = None
        self._num_questions = 0  # answered or failed
        self._stall = StallTimer()
        self._asker = PeriodicThread("store asker", _ASK_SECONDS, self._ask)
        self._watcher = PeriodicThread("store watch", _ASK_SECONDS, self._look)
        self._asker.start()
        self._watcher.start()

    def close(self) -> None:
        """End the watch. A thread that is still in torch's client when the interpreter ends would abort the process."""
        if not self._asker.stop(_STOP_SECONDS):
            hang_up(self._port)
            self._asker.stop(_STOP_SECONDS)
        self._watcher.stop(_STOP_SECONDS)

    def _ask(self) -> None:
        # Connecting may take longer than the patience: an attempt that is given up would look like an answer.
        timeout = timedelta(seconds=2 * self._patience_seconds + 1)
        try:
            if self._client is None:
                self._client = TCPStore(
                    self._host, self._port, is_master=False, wait_for_workers=False, timeout=timeout
                )
            self._client.check(["elastic_mnist/is_anybody_there"])
        except RuntimeError:
            self._client = None
        self._num_questions += 1

    def _look(self) -> None:
        if self._stall.seconds(self._num_questions) >= self._patience_seconds:
            hang_up(self._port)


def hang_up(port: int) -> None:
    """Shut all connections of this process that lead to a port, whoever uses them."""
    for path in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # the listing's own descriptor, or one that is not connected
            if not path.is_socket():
                continue
            with socket.socket(fileno=os.dup(int(path.name))) as connection:
                peer = connection.getpeername()
                if connection.family in (socket.AF_INET, socket.AF_INET6) and peer[1] == port:
                    connection.shutdown(socket.SHUT_RDWR)

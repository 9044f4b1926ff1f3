"""The agent's watch over the rendezvous' store: whether it answers at all.

A node that was cut off or stopped closes no connection, and torch's client waits for its answer for ever: the timeout
that it takes ends in a second wait, which has none. So one thread asks the store a trifle now and then, and another one
hangs up once there has been no answer for too long: whatever waits for the store in this process then ends with an
error, and so does the agent, in order.

Imported by the agent alone.
"""

import contextlib
import os
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Final

from torch.distributed import TCPStore

from elastic_mnist.pulse import Stillness

_ASK_SECONDS: Final = 1.0
_CONNECT: Final = timedelta(seconds=60)


class StoreWatch:
    """Hangs up on a store that does not answer.

    Args:
        store: the agent's; it serves it, or is a client.
        patience_seconds: without an answer. An outage that is shorter is overcome by itself.
    """

    def __init__(self, store: TCPStore, *, patience_seconds: float) -> None:
        self._host, self._port = store.host, store.port
        self._patience_seconds = patience_seconds
        self._num_answers = 0
        threading.Thread(target=self._ask, name="store asker", daemon=True).start()
        threading.Thread(target=self._watch, name="store watch", daemon=True).start()

    def _ask(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is gone, and whoever asks it next is told so
            store = TCPStore(self._host, self._port, is_master=False, wait_for_workers=False, timeout=_CONNECT)
            while True:
                store.check(["elastic_mnist/is_anybody_there"])
                self._num_answers += 1
                time.sleep(_ASK_SECONDS)

    def _watch(self) -> None:
        stillness = Stillness()
        while stillness.seconds(self._num_answers) < self._patience_seconds:
            time.sleep(_ASK_SECONDS)
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

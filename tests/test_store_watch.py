"""The agent's watch over the rendezvous' store, apart from a job; in one: `test_network.py`, `test_agents_long.py`."""

import socket
import threading
from collections.abc import Iterator

import pytest
from harness import eventually
from torch.distributed import TCPStore

from elastic_mnist.store_watch import StoreWatch, hang_up


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A server that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_hanging_up_ends_a_wait_and_leaves_others_alone(silent: socket.socket) -> None:
    """Whoever waits for an answer from that port gets the end of the connection; from another port, nothing."""
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.create_connection(silent.getsockname()) as waiting,
        socket.create_connection(other.getsockname()) as untouched,
    ):
        received: list[bytes] = []
        thread = threading.Thread(target=lambda: received.append(waiting.recv(1)))
        thread.start()
        hang_up(silent.getsockname()[1])
        thread.join(10)
        assert received == [b""]
        untouched.settimeout(0.2)
        with pytest.raises(TimeoutError):
            untouched.recv(1)


def test_a_store_that_answers_is_let_be() -> None:
    """While it answers, its connections stay; the watch is seen to have asked for longer than its patience."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    watch = StoreWatch(store, patience_seconds=1.5)
    eventually(lambda: watch._num_answers >= 3)
    store.set("key", "value")
    assert store.get("key") == b"value"

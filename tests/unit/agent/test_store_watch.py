"""The agent's watch over the rendezvous' store, apart from a job; in one: `test_network.py`, `test_agents_long.py`."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest
from harness import eventually
from torch.distributed import DistNetworkError, TCPStore

from elastic_mnist.agent import store_watch
from elastic_mnist.agent.store_watch import StoreWatch, hang_up


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


@pytest.fixture
def store() -> Iterator[tuple[TCPStore, psutil.Process]]:
    """A client of a store, and the process that serves it."""
    serve = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", serve], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            yield TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False), psutil.Process(process.pid)
        finally:
            process.kill()


@pytest.fixture
def watch(store: tuple[TCPStore, psutil.Process]) -> Iterator[StoreWatch]:
    """A watch over it that has had its first answer."""
    watch = StoreWatch(store[0], patience_seconds=2.5)
    eventually(lambda: watch._num_questions > 0)
    yield watch
    watch.close()
    assert not watch._asker.is_alive


def test_a_store_that_falls_silent_is_hung_up_on(store: tuple[TCPStore, psutil.Process], watch: StoreWatch) -> None:
    """Whoever waits for a store whose process stands still gets an error, where torch's client would wait for ever."""
    client, server = store
    client.set("key", "value")
    server.suspend()
    os.waitpid(server.pid, os.WUNTRACED)  # until the last of its threads stands still
    with pytest.raises(RuntimeError):
        client.get("key")
    assert watch._asker.is_alive


def test_a_store_that_answers_is_let_be(store: tuple[TCPStore, psutil.Process], watch: StoreWatch) -> None:
    """While it answers, its connections stay; the watch is seen to have asked for longer than its patience."""
    client, _ = store
    eventually(lambda: watch._num_questions >= 4)
    client.set("key", "value")
    assert client.get("key") == b"value"


def test_a_connection_of_the_watch_that_breaks_harms_nobody(
    store: tuple[TCPStore, psutil.Process], watch: StoreWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch makes itself a new one, and goes on asking for longer than its patience."""
    client, _ = store
    connections: list[TCPStore] = []

    class Breaks(TCPStore):
        """Answers nothing more once it has been asked."""

        def check(self, _keys: list[str]) -> bool:
            connections.append(self)
            raise DistNetworkError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(store_watch, "TCPStore", Breaks)
        broken = StoreWatch(client, patience_seconds=2.5)
        eventually(lambda: len(connections) >= 4)
    assert len(set(map(id, connections))) > 1
    number = broken._num_questions
    eventually(lambda: broken._num_questions > number + 1)
    client.set("key", "value")
    assert client.get("key") == b"value"
    broken.close()
    assert watch._asker.is_alive

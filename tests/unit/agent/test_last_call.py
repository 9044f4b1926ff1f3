"""How long a round of the rendezvous waits: a node that waits is taken along, and nobody waits for nobody."""

import os
import threading
import time
from datetime import timedelta

import pytest
from harness import eventually, free_port
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend

from elastic_mnist.agent.last_call import build_handler
from elastic_mnist.agent.rendezvous import ElasticRendezvous


def one_to_two(endpoint: str, **config: object) -> RendezvousParameters:
    """Return what torchrun passes on for `--nnodes=1:2`."""
    return RendezvousParameters("c10d", endpoint, "id", 1, 2, "127.0.0.1", keep_alive_interval=1, **config)


@pytest.mark.parametrize(("asked", "without", "with_waiting"), [(1, 1, 3), (10, 10, 10)])
def test_the_last_call_hangs_on_whether_nodes_wait(asked: int, without: int, with_waiting: int) -> None:
    """It is what was asked for, and while nodes wait, no shorter than some of their looks; all else is torch's."""
    store = HashStore()
    parameters = one_to_two("", last_call_timeout=asked)
    handler, last_call = build_handler(store, C10dRendezvousBackend(store, "id"), parameters)
    stock = dynamic_rendezvous.create_handler(store, C10dRendezvousBackend(store, "id"), parameters).settings
    assert handler.settings.timeout is last_call
    assert {**vars(handler.settings), "timeout": None} == {**vars(stock), "timeout": None}
    assert (last_call.join, last_call.close) == (stock.timeout.join, stock.timeout.close)
    assert last_call.last_call == timedelta(seconds=without)
    last_call.num_nodes_waiting = 1
    assert last_call.last_call == timedelta(seconds=with_waiting)


def test_a_node_that_has_just_looked_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that looks seldom is part of the first round that begins while it waits, with a last call of a second."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    endpoint, has_looked = f"127.0.0.1:{free_port()}", threading.Event()
    newcomers: list[threading.Thread] = []

    def look_seldom(seconds: float | tuple[float, float]) -> None:
        if threading.current_thread() in newcomers:
            has_looked.set()
            time.sleep(2)  # torch's own second, on a busy machine
        else:
            time.sleep(1 if seconds == 1 else 0)

    monkeypatch.setattr(dynamic_rendezvous, "_delay", look_seldom)

    def node(*, is_host: bool) -> ElasticRendezvous:
        parameters = one_to_two(endpoint, last_call_timeout=1, is_host=is_host)
        backend, store = create_backend(parameters)
        handler, last_call = build_handler(store, backend, parameters)
        return ElasticRendezvous(handler, "c10d", None, store, endpoint, last_call=last_call, watch=None)

    first = node(is_host=True)
    assert first.next_rendezvous().world_size == 1
    joined: list[RendezvousInfo] = []
    newcomer = threading.Thread(target=lambda: joined.append(node(is_host=False).next_rendezvous()), daemon=True)
    newcomers.append(newcomer)
    newcomer.start()
    assert eventually(first.num_nodes_waiting) == 1
    has_looked.clear()
    assert has_looked.wait(30)
    assert first.next_rendezvous().world_size == 2
    newcomer.join(30)
    assert [info.world_size for info in joined] == [2]
    first.shutdown()

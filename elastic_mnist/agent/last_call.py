"""How long a round of the rendezvous waits for its last nodes.

A node that waits looks once a second whether a new round has begun, as torch has it. With a last call of one second,
which is all that a recovery should spend, it may just miss it: the round is over without it, and the workers that were
stopped for its sake are started, and stopped for it once more. So a round that begins while nodes are known to wait
has the patience of some of their looks, also where `--rdzv_conf` asks for less. It ends at once, as ever, when it is
full.

Imported by the agent alone, and after torch's rendezvous package, which it builds on.
"""

from datetime import timedelta
from typing import Final

from torch.distributed import Store
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    create_handler,
)

_LOOKS: Final = timedelta(seconds=3)


class LastCall(RendezvousTimeout):
    """The timeouts of a rendezvous, of which the last call hangs on whether nodes wait.

    Attributes:
        num_nodes_waiting: as last seen from outside of a round.
    """

    def __init__(self, stock: RendezvousTimeout) -> None:
        super().__init__(stock.join, stock.last_call, stock.close, stock.heartbeat)
        self.num_nodes_waiting = 0

    @property
    def last_call(self) -> timedelta:
        """How long a round with enough nodes waits for more."""
        seconds = super().last_call
        return max(seconds, _LOOKS) if self.num_nodes_waiting else seconds


def build_handler(
    store: Store, backend: RendezvousBackend, parameters: RendezvousParameters
) -> tuple[DynamicRendezvousHandler, LastCall]:
    """Return torch's handler as `parameters` describe it, and what its last call hangs on."""
    stock = create_handler(store, backend, parameters).settings  # torch's own reading of them
    last_call = LastCall(stock.timeout)
    handler = DynamicRendezvousHandler.from_backend(
        stock.run_id,
        store,
        backend,
        stock.min_nodes,
        stock.max_nodes,
        parameters.local_addr,
        last_call,
        keep_alive_interval=round(stock.keep_alive_interval.total_seconds()),
        keep_alive_max_attempt=stock.keep_alive_max_attempt,
    )
    return handler, last_call

"""torchrun's plug-in: what makes elastic launches of this package safe.

torchrun loads `install` through the entry-point group `torchrun.handlers` when an agent starts, in every
job of the environment. It acts only where the launched module is `elastic_mnist`, and there:

- checks the options and the data before any worker starts: a mistake costs a second and one line;
- turns `--nnodes=MIN:MAX` without `--rdzv_backend` into an elastic (c10d) rendezvous at
  `--master_addr:--master_port`; torchrun's own choice, the static one, waits for MAX nodes;
- gives each generation of workers a name of its own in the rendezvous' store. Stock workers share one
  namespace over restarts and may read the addresses of the dead;
- ends the agent, instead of restarting its workers, where a worker has said that this is of no use;
- does for the node's workers what outlives them (`node`), and watches over the rendezvous (`store_watch`);
- ends an agent that was asked to stop with status 143, and one whose rendezvous is over with 1; its last line says so.

Invariant: torchrun's public interfaces (`RendezvousHandler`, `create_backend`, and for `last_call`, `create_handler`,
`DynamicRendezvousHandler`, `RendezvousTimeout`) are all it builds on; the one private thing it touches is the table of
registered backends. Where that has moved, it says so and leaves stock behaviour. Relied on as well: an agent starts
its workers when `next_rendezvous` has returned, asks for `num_nodes_waiting` while it has some, and calls `shutdown`
last, in the midst of the exception it ends with.
"""

import contextlib
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Final

from torch.distributed import DistNetworkError, DistStoreError, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousTimeoutError,
)

from elastic_mnist.agent.store_watch import StoreWatch
from elastic_mnist.errors import EXIT_FAILURE, EXIT_STOPPED, EXIT_USAGE, print_message
from elastic_mnist.ipc import environment

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    from elastic_mnist.agent.last_call import LastCall
    from elastic_mnist.agent.workers import Node
    from elastic_mnist.settings import Settings


_STOPPED: Final = "stopped; the same command goes on from here"

_GONE: Final = (
    "is gone: the node that hosts it has ended or cannot be reached; start the job again, it goes on from its newest "
    "snapshot"
)
_ENDS: Final[dict[type[Exception], str]] = {
    RendezvousConnectionError: _GONE,
    DistNetworkError: _GONE,
    DistStoreError: "has lost a node that was about to take part; start the job again, it goes on from its newest "
    "snapshot",
    RendezvousClosedError: "is closed: its job has ended; start another one with an --rdzv_id of its own",
    RendezvousTimeoutError: "has too few nodes, and no more came in time; start them together",
}
"""Ways in which a rendezvous ends for a node, and what can be done about it."""


class RendezvousOverError(RendezvousError):
    """The rendezvous is over for this node; one line for people."""


class _StoppedByOthers(Exception):  # noqa: N818 - what was asked for, and no error
    """The workers were asked to stop, and not by their agent: it does not start them again."""


class AgentExit(Exception):  # noqa: N818 - it may be a good end
    """The agent ends with a status, and people have been told why.

    No SystemExit: at the interpreter's ordinary exit, a thread of torch in the middle of a call may abort the process.
    """

    def __init__(self, status: int) -> None:
        super().__init__(f"exit status {status}")
        self.status = status


def end_of(error: BaseException) -> str:
    """Return how a rendezvous ended, and what can be done about it."""
    return next(text for kind, text in _ENDS.items() if isinstance(error, kind))


def is_stop(error: BaseException | None) -> bool:
    """Whether an agent ends because it was asked to stop, or all of its workers were."""
    from torch.distributed.elastic.multiprocessing import SignalException  # noqa: PLC0415 - only at the end
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415 - the same

    if isinstance(error, ChildFailedError):
        return all(failure.exitcode == EXIT_STOPPED for failure in error.failures.values())
    return isinstance(error, (SignalException, _StoppedByOthers))


class StaticRendezvous(RendezvousHandler):
    """A rendezvous whose agent serves its workers, holds signals while it starts them, and ends where one is refused.

    Args:
        inner: does the work.
        backend: the name torchrun knows this by.
        options: the workers' settings; None where they are another module's.
    """

    latest: "ClassVar[StaticRendezvous | None]" = None
    """The agent's own, for whoever tells of its end."""

    def __init__(self, inner: RendezvousHandler, backend: str, options: "Settings | None") -> None:
        if options is not None:
            StaticRendezvous.latest = self
        self._inner = inner
        self._backend = backend
        self._store: Store | None = None
        os.environ[environment.AGENT_PID] = str(os.getpid())
        for name in (environment.JOB_ID, environment.MEMORY, environment.PULSE, environment.STORE_ENDPOINT):
            os.environ.pop(name, None)  # an agent may itself be some worker's child
        self._node: Node | None = None  # another program's workers would stay deaf to signals
        if options is not None:
            from elastic_mnist.agent import workers  # noqa: PLC0415 - other torchrun jobs must not pay for it

            self._node = workers.Node(options)

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round. The agent starts its workers then."""
        if self._node is not None:
            self._node.let_signals_through()
        info = self._join()
        if self._node is not None:
            self._node.begin_generation()
        return info

    def _join(self) -> RendezvousInfo:
        """Join the next round."""
        self._end_if_refused()
        if self._node is not None and self._node.is_stopped_by_others:
            raise _StoppedByOthers
        info = self._inner.next_rendezvous()
        if self._store is None:  # the workers write to it without the agents' prefix
            self._store = getattr(info.store, "underlying_store", None)
        if self._store is not None and environment.JOB_ID not in os.environ:
            key = f"elastic_mnist/{self.get_run_id()}/job_id"
            os.environ[environment.JOB_ID] = self._store.compare_set(key, "", uuid.uuid4().hex).decode()
        return info

    def _end_if_refused(self) -> None:
        """End the agent where one of its workers has said that starting it again is of no use."""
        if self._node is not None and self._node.is_refused:
            raise AgentExit(EXIT_USAGE)

    def shutdown(self) -> bool:
        """Close the rendezvous; the agent calls this last.

        Not where its workers were refused: the others' job is not over for a node that came with a mistake.
        """
        was_stopped, is_others_job = is_stop(sys.exc_info()[1]), self._is_others_job()
        if self._node is not None:
            self._node.end()
            if not was_stopped:  # of a stop, there is more to say when all is over
                self._node.save(are_others_at_work=is_others_job)
        self._end_if_refused()
        return was_stopped or is_others_job or self._inner.shutdown()

    def stop(self, error: BaseException) -> int:
        """End as an agent that was asked to stop, and say how that went; return the exit status."""
        sign = getattr(error, "sigval", None)
        reason = "the workers were stopped" if sign is None else signal.Signals(sign).name
        is_saved = self._node is None or self._node.stop(reason)
        print_message(_STOPPED if is_saved else "error: stopped, and what came after the newest snapshot is not saved")
        return EXIT_STOPPED if is_saved else EXIT_FAILURE

    def _is_others_job(self) -> bool:
        """Whether this node alone ends, and the job goes on without it."""
        return False

    def get_backend(self) -> str:
        """Return the name torchrun asked for."""
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        """Whether the bootstrap address is the agent's own; never in an elastic rendezvous, see `_create`."""
        return self._inner.use_agent_store

    def is_closed(self) -> bool:
        """Whether the job is over."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """End the job for all nodes."""
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """Return the number of nodes that would join. The agent asks all the time, while it has workers."""
        if self._node is not None:
            self._node.let_signals_through()
        number = self._inner.num_nodes_waiting()
        if self._node is not None:
            self._node.announce(number)
        return number

    def get_run_id(self) -> str:
        """Return the rendezvous' id."""
        return self._inner.get_run_id()


class ElasticRendezvous(StaticRendezvous):
    """A rendezvous that also tells the workers of each round which store and which namespace are theirs.

    Args:
        inner: does the work.
        backend: the name torchrun knows this by.
        options: the workers' settings; None where they are another module's.
        store: the rendezvous' store.
        location: of the store, for people: HOST:PORT, or a file.
        last_call: told of the nodes that wait.
        watch: over the store; None where it is a file.
    """

    def __init__(
        self,
        inner: "DynamicRendezvousHandler",
        backend: str,
        options: "Settings | None",
        store: Store,
        location: str,
        *,
        last_call: "LastCall",
        watch: StoreWatch | None,
    ) -> None:
        super().__init__(inner, backend, options)
        self._store = store
        self._location = location
        self._last_call = last_call
        self._watch = watch
        self._min_nodes = inner.settings.min_nodes
        self._num_others = 0
        self._num_rounds = 0
        if isinstance(store, TCPStore):
            os.environ[environment.STORE_ENDPOINT] = location

    def _join(self) -> RendezvousInfo:
        """Join the next round, and name it for the workers that the agent starts then."""
        with self._told():
            try:
                info = super()._join()
            except RendezvousGracefulExitError:  # torchrun would stumble over it
                print_message(f"the job at {self._location} has ended, and had no need of this node")
                raise AgentExit(0) from None
            # The round's store is a namespace of the agents alone; its first member names the workers'.
            key = "elastic_mnist/generation_key"
            if info.rank == 0:
                info.store.set(key, uuid.uuid4().hex)
            os.environ[environment.GENERATION_KEY] = info.store.get(key).decode()
        os.environ[environment.ROUNDS_JOINED] = str(self._num_rounds)
        # Once, or its terminal would stay silent, and look like a job of its own. Which of the nodes has the worker of
        # rank 0 is not for the agents to know.
        if info.world_size > 1 and self._num_rounds == 0:
            print_message(
                f"one of {info.world_size} nodes in the job at {self._location}; the one with rank 0 tells of the "
                f"training. For a job of its own, choose another --master_port"
            )
        self._last_call.num_nodes_waiting = 0
        self._num_rounds += 1
        self._num_others = info.world_size - 1
        return info

    def num_nodes_waiting(self) -> int:
        """Return the number of nodes that would join."""
        with self._told():
            self._last_call.num_nodes_waiting = super().num_nodes_waiting()
        return self._last_call.num_nodes_waiting

    def shutdown(self) -> bool:
        """Close the rendezvous; the agent calls this last."""
        try:
            return super().shutdown()
        finally:
            if self._watch is not None:
                self._watch.close()

    def _is_others_job(self) -> bool:
        """Whether this node has failed for good and the others are enough; if it hosts the store, they end as well."""
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415 - only at the end

        return isinstance(sys.exc_info()[1], ChildFailedError) and self._num_others >= self._min_nodes

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Say in one line how the rendezvous ended."""
        try:
            yield
        except tuple(_ENDS) as error:
            raise RendezvousOverError(f"the rendezvous at {self._location} {end_of(error)}") from error

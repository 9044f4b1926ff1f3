"""torchrun's plug-in: what makes elastic launches of this package safe."""

import contextlib
import io
import json
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final, NoReturn

from torch.distributed import DistNetworkError, DistStoreError, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, rendezvous_handler_registry

from elastic_mnist.agent.rendezvous import (
    AgentExit,
    ElasticRendezvous,
    RendezvousOverError,
    StaticRendezvous,
    end_of,
    is_stop,
)
from elastic_mnist.agent.store import meet
from elastic_mnist.agent.store_watch import StoreWatch
from elastic_mnist.errors import EXIT_FAILURE, EXIT_USAGE, UsageError, print_message

if TYPE_CHECKING:
    from elastic_mnist.settings import Settings


MODULE: Final = "elastic_mnist"


# A lost node is noticed after interval x attempts; torchrun's own 5 s x 3 was most of a recovery's time.
# Five attempts, because a busy machine may well hold up one heartbeat.
_DEFAULTS: Final = {"keep_alive_interval": 1, "keep_alive_max_attempt": 5, "last_call_timeout": 1}


Creator = Callable[[RendezvousParameters], RendezvousHandler]


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def install() -> Creator:
    """Put the elastic rendezvous behind torchrun's backends `static` and `c10d`, for this package's jobs.

    Returns:
        The creator that torchrun registers under the entry point's own name, so that
        `--rdzv_backend=elastic_mnist` asks for it openly.
    """
    if MODULE in sys.argv:
        sys.excepthook = _end_in_one_line(sys.excepthook)
    try:
        creators = rendezvous_handler_registry._registry  # noqa: SLF001 - `register` refuses a second creator
        for backend in ("static", "c10d"):
            creators[backend] = _choose(creators[backend])
    except (AttributeError, KeyError, TypeError):
        if _launch() is not None:
            print_message("this torch keeps its rendezvous backends elsewhere; use --rdzv_backend=elastic_mnist")
    return _create


def _end_in_one_line(otherwise: Hook) -> Hook:
    """Return a hook that tells the ends of an agent that are nobody's bug in one line, without a traceback."""

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if StaticRendezvous.latest is not None and is_stop(error):
            status = StaticRendezvous.latest.stop(error)
        elif isinstance(error, AgentExit):
            status = error.status
        elif _launch() is not None and _is_taken(error):
            print_message("error: the port is taken; choose another --master_port")
            status = EXIT_USAGE
        elif isinstance(error, RendezvousOverError):
            print_message(f"error: {error}")
            status = EXIT_FAILURE
        elif _launch() is not None and isinstance(error, (DistNetworkError, DistStoreError)):
            # While the agents agreed on their workers' ranks, where no handler of ours takes part.
            print_message(f"error: the rendezvous {end_of(error)}")
            status = EXIT_FAILURE
        else:
            otherwise(kind, error, traceback)
            return
        with contextlib.suppress(AttributeError, OSError, ValueError):
            sys.stdout.flush()  # what torchrun tees there
        os._exit(status)

    return hook


def _is_taken(error: BaseException | None) -> bool:
    """Whether an agent could not listen where the static rendezvous has it listen."""
    return isinstance(error, DistNetworkError) and "EADDRINUSE" in str(error)


def _choose(stock: Creator) -> Creator:
    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        arguments = _launch()
        if arguments is None:
            return stock(parameters)
        if parameters.backend == "static" and parameters.min_nodes == parameters.max_nodes:
            options = _check_before_start(arguments)
            return StaticRendezvous(stock(parameters), parameters.backend, options)
        return _create(parameters)

    return create


def _launch() -> Namespace | None:
    """Return torchrun's arguments where they launch this package's module."""
    if MODULE not in sys.argv:
        return None
    with contextlib.suppress(Exception, SystemExit), contextlib.redirect_stderr(io.StringIO()):
        from torch.distributed.run import parse_args  # noqa: PLC0415 - only a torchrun agent needs it

        arguments: Namespace = parse_args(sys.argv[1:])
        if arguments.module and arguments.training_script == MODULE:
            return arguments
    return None


def _check_before_start(arguments: Namespace) -> "Settings":
    """Return the workers' settings; end the agent with one line where they could not start.

    This is also where a node's data is fetched: once a node, before anybody waits in a collective.
    """
    from elastic_mnist import data, settings  # noqa: PLC0415 - other torchrun jobs must not pay for it

    _log_to_stderr()
    try:
        options = settings.parse(arguments.training_script_args)
        data.ensure(options.dataset, options.data_dir)
    except UsageError as error:
        _end(str(error))
    return options


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    """Build the elastic rendezvous that `parameters` describe, for this package's module or for another's."""
    arguments = _launch()
    options = None if arguments is None else _check_before_start(arguments)
    from elastic_mnist.agent.last_call import build_handler  # noqa: PLC0415 - see there

    # Each generation gets a bootstrap address of its own, published anew. With the shared one, torchrun's
    # agents cache the first address, and a node that joins waits for it in vain.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    for key, value in _DEFAULTS.items():
        parameters.config.setdefault(key, value)
    try:
        backend, store = meet(parameters)
        if options is not None:
            _check_same_job(store, parameters, options)
    except UsageError as error:
        _end(str(error))
    location, watch = parameters.endpoint, None
    if isinstance(store, TCPStore):
        location = f"{store.host}:{store.port}"
        seconds = parameters.get_as_int("read_timeout", 60)
        assert seconds is not None
        watch = StoreWatch(store, patience_seconds=float(seconds))
    print_message(
        f"elastic rendezvous at {location} for {parameters.min_nodes} to "
        f"{parameters.max_nodes} nodes"
        + (", in place of the static one, which waits for all" if parameters.backend == "static" else "")
    )
    handler, last_call = build_handler(store, backend, parameters)
    return ElasticRendezvous(handler, parameters.backend, options, store, location, last_call=last_call, watch=watch)


def _check_same_job(store: Store, parameters: RendezvousParameters, options: "Settings") -> None:
    """Raise `UsageError` where a job under other settings runs here already, before this one disturbs it.

    The first agent leaves its settings in the rendezvous' store.
    """
    from elastic_mnist.settings import disagreements  # noqa: PLC0415 - other torchrun jobs must not pay for it

    mine = options.of_scope("run", "world")
    theirs = json.loads(store.compare_set(f"elastic_mnist/{parameters.run_id}/settings", "", json.dumps(mine)))
    texts = disagreements(mine, theirs, "there")
    if texts:
        other = "--master_port" if isinstance(store, TCPStore) else "--rdzv_id"
        raise UsageError(
            f"{parameters.endpoint}: a job under other settings runs there: {texts}; start its nodes with the same "
            f"options, or another job with another {other}"
        )


def _end(message: str) -> NoReturn:
    print_message(f"error: {message}")
    raise SystemExit(EXIT_USAGE)


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("elastic_mnist: %(message)s"))
    package = logging.getLogger(MODULE)
    package.handlers = [handler]
    package.setLevel(logging.INFO)
    package.propagate = False

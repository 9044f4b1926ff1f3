"""Where the agents meet: the rendezvous' store, hosted by one of them and joined by the others, or a file.

What keeps an agent from it is told within a bound, as a `UsageError`; torch's client would wait without end.

Imported by the agent alone.
"""

import contextlib
import os
import socket
import threading
import time
from ipaddress import ip_address
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from elastic_mnist.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed import Store
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

_ANSWER_SECONDS: Final = 4.0
"""A store answers within milliseconds; what listens and is silent for twice as long is another program."""

_FIRST_NODE_SECONDS: Final = 60.0
"""A second node may be started this long before the first one listens."""


class _NotHostedError(RendezvousConnectionError):
    """The store can be neither hosted nor reached; says why it cannot be hosted."""


def meet(parameters: RendezvousParameters) -> "tuple[RendezvousBackend, Store]":
    """Return the rendezvous' backend and store.

    Raises:
        UsageError: they cannot be had.
    """
    endpoint = parameters.endpoint
    if _is_in_file(parameters):
        _check_file(endpoint)
    answers: SimpleQueue[tuple[RendezvousBackend, Store] | Exception] = SimpleQueue()

    def ask() -> None:  # in a thread, because it may wait for the answer of a server that is no store
        try:
            answers.put(_host_or_join(parameters))
        except Exception as error:  # noqa: BLE001 - carried to the main thread, whatever it is
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()
    deadline = time.monotonic() + _FIRST_NODE_SECONDS
    was_listening = False  # seen twice, because the first node may have begun a moment ago
    while time.monotonic() < deadline:
        with contextlib.suppress(Empty):
            answer = answers.get(timeout=_ANSWER_SECONDS)
            if isinstance(answer, _NotHostedError):
                raise UsageError(f"{endpoint}: cannot be listened at: {answer}; choose another --master_port")
            if isinstance(answer, RendezvousConnectionError):
                break
            if isinstance(answer, Exception):
                raise answer
            return answer
        is_listening = _is_listening(endpoint)
        if is_listening and was_listening:
            raise UsageError(
                f"{endpoint}: another program holds this port; choose another with --master_port or --rdzv_endpoint"
            )
        was_listening = is_listening
    raise UsageError(f"{endpoint}: nobody listens there; start the first node first, or correct --master_addr")


def is_own(endpoint: str) -> bool:
    """Whether an endpoint is this machine: by its name, or an address that it reaches from that same address."""
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint  # noqa: PLC0415 - an agent's alone

    host, _ = parse_rendezvous_endpoint(endpoint, default_port=0)
    if host == socket.gethostname():
        return True
    with contextlib.suppress(OSError, UnicodeError):  # an unknown host, or no host's name
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                own = ip_address(address[0])
                if own.is_loopback or own.is_unspecified or probe.getsockname()[0] == address[0]:
                    return True
    return False


def _host_or_join(parameters: RendezvousParameters) -> "tuple[RendezvousBackend, Store]":
    """Host the store where the endpoint is an address of this machine, else join it.

    torch looks only at the addresses that the machine's name leads to: no node would host another one, and a name that
    leads nowhere would be the end.
    """
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend  # noqa: PLC0415

    if _is_in_file(parameters) or parameters.get("is_host") is not None:
        return create_backend(parameters)
    parameters.config["is_host"] = is_own(parameters.endpoint)
    if not parameters.config["is_host"]:
        return create_backend(parameters)
    try:
        return create_backend(parameters)
    except RendezvousConnectionError as error:  # another node of this machine listens there, perhaps
        parameters.config["is_host"] = False
        try:
            return create_backend(parameters)
        except RendezvousConnectionError:
            raise _NotHostedError(str(error.__cause__ or error).partition("\n")[0][:200]) from None


def _is_in_file(parameters: RendezvousParameters) -> bool:
    """Whether the store is a file; as torch reads it."""
    return (parameters.get("store_type") or "").strip().lower() == "file"


def _check_file(path: str) -> None:
    """Refuse a file that cannot be used: torch would wait for it, or take one of its own."""
    if not path:
        raise UsageError("--rdzv_endpoint: is missing; name a file that all nodes see")
    directory = Path(path).absolute().parent
    if not os.access(path if Path(path).exists() else directory, os.W_OK):
        raise UsageError(f"--rdzv_endpoint {path}: cannot be written to; name a file in a directory that is there")


def _is_listening(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1):
            return True
    except (OSError, ValueError):
        return False

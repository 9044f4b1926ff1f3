"""A small HTTP proxy before one server, which spoils requests on demand.

A `Fault` says how, which requests, and how many of them; it counts what it spoiled, so that a test can prove that it
fired. All other requests pass. Every request is noted.
"""

import http.client
import re
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

from typing_extensions import Self

Kind = Literal[
    "answer", "reset", "stall", "cut_request", "hold_request", "cut_answer", "lose_answer", "drop_conditions"
]

NOT_PASSED_ON = {"connection", "keep-alive", "transfer-encoding", "date", "server"}
CONDITIONS = {"if-match", "if-none-match"}
HOLD_SECONDS = 60.0


@dataclass(kw_only=True)
class Fault:
    """What happens to the next requests of a kind.

    Attributes:
        kind: "answer": the proxy answers, and the server hears nothing. "reset": neither does anybody. "stall": the
            request is heard, and no answer comes. "cut_request": the server gets half of the body. "hold_request": so
            it does, and waits for the rest until it ends. "cut_answer": the client gets half of the body.
            "lose_answer": the server does what it is asked, and the client hears nothing. "drop_conditions": the server
            does what it is asked, as if under no condition.
        of: a pattern of "METHOD /path?query".
        times: how many requests.
        status, body: the proxy's own answer.
        num_fired: how many requests there were.
        has_fired: set with the first one.
        is_halfway: set when the server has got the half of a body that it gets.
    """

    kind: Kind
    of: str = ".*"
    times: int = 1
    status: int = 503
    body: bytes = b""
    num_fired: int = field(default=0, init=False)
    has_fired: threading.Event = field(default_factory=threading.Event, init=False)
    is_halfway: threading.Event = field(default_factory=threading.Event, init=False)


def s3_error(code: str) -> bytes:
    """Return the body of an S3 server's error."""
    return (
        f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>so it is</Message></Error>'.encode()
    )


class FaultyProxy:
    """The proxy, for the length of a `with`.

    Args:
        server_port: of the server on this host.
    """

    def __init__(self, server_port: int) -> None:
        self.server_port = server_port
        self.requests: list[str] = []
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self.is_closing = threading.Event()
        proxy = self

        class Handler(_Handler):
            """Knows its proxy."""

            owner = proxy

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> Self:
        """Serve."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of stalled requests, and end."""
        self.is_closing.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    @property
    def endpoint(self) -> str:
        """The URL to give to clients."""
        return f"http://127.0.0.1:{self._http.server_port}"

    def add(self, fault: Fault) -> Fault:
        """Spoil the next requests of that kind."""
        with self._lock:
            self._faults.append(fault)
        return fault

    def heal(self) -> None:
        """Let all requests pass from here on."""
        with self._lock:
            self._faults.clear()

    def meet(self, request: str) -> Fault | None:
        """Note a request, and return what is to happen to it."""
        with self._lock:
            self.requests.append(request)
            for fault in self._faults:
                if fault.num_fired < fault.times and re.match(fault.of, request):
                    fault.num_fired += 1
                    fault.has_fired.set()
                    return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    owner: FaultyProxy

    def handle_any(self) -> None:
        """Pass a request on, or spoil it."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.owner.meet(f"{self.command} {self.path}")
        kind = fault.kind if fault else None
        if fault and kind == "answer":
            return self._answer(fault.status, {"Content-Type": "text/html"}, fault.body)
        if kind == "stall":
            self.owner.is_closing.wait()
        if kind in ("reset", "stall"):
            return self._hang_up()
        try:
            if fault and kind in ("cut_request", "hold_request"):
                self._send_half(body, fault)
                return self._hang_up()
            status, headers, content = self._ask(body, are_conditions_dropped=kind == "drop_conditions")
        except (OSError, http.client.HTTPException):  # the server is gone
            return self._hang_up()
        if kind == "lose_answer":
            return self._hang_up()
        self._answer(status, headers, content, num_sent=len(content) // 2 if kind == "cut_answer" else None)
        return None

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any  # noqa: N815 - the names that http.server calls

    def _ask(self, body: bytes, *, are_conditions_dropped: bool) -> tuple[int, dict[str, str], bytes]:
        """Pass a request on; return status, headers and body of the answer."""
        dropped = CONDITIONS if are_conditions_dropped else ()
        headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
        connection = http.client.HTTPConnection("127.0.0.1", self.owner.server_port)
        try:
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def _send_half(self, body: bytes, fault: Fault) -> None:
        """Let the server wait for a body that breaks off, and the client for an answer."""
        lines = [f"{self.command} {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in self.headers.items())]
        with socket.create_connection(("127.0.0.1", self.owner.server_port)) as server:
            server.sendall("\r\n".join([*lines, "", ""]).encode() + body[: len(body) // 2])
            fault.is_halfway.set()
            if fault.kind == "hold_request":
                server.settimeout(HOLD_SECONDS)
                while server.recv(4096):  # a word that it may go on, but no answer
                    pass

    def _answer(self, status: int, headers: dict[str, str], content: bytes, *, num_sent: int | None = None) -> None:
        """Send an answer, or the beginning of one."""
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in {*NOT_PASSED_ON, "content-length"}:
                self.send_header(name, value)
        length = next((value for name, value in headers.items() if name.lower() == "content-length"), len(content))
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:num_sent])
        if num_sent is not None:
            self._hang_up()

    def _hang_up(self) -> None:
        """Close the connection, with what was not said."""
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        """Keep quiet."""

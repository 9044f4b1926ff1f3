"""A real S3 server process: moto's, with each request under one lock.

Moto looks at a condition and writes in two steps, between which another thread may come; S3 does not. The lock gives
the server the atomicity that its model has; what a request does is moto's alone. The server keeps its objects in its
memory, answers at a free port, and ends with the test run.

One with a journal may be killed and come back. Before it answers a request that changes something, it notes that one in
the journal; when it starts, it repeats what stands there, and only then listens. (Moto's own recorder notes a request
before it has done it, and can repeat it only to a server that listens already: whoever asks then finds no bucket.)
"""

import base64
import io
import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from typing_extensions import Self

PAGE_SIZE = 10
"""Number of objects on one page of a listing, for which S3 has 1,000."""


class S3Server:
    """The server, for the length of a `with`.

    Args:
        journal: a file that keeps its contents for `restart`.
    """

    def __init__(self, journal: Path | None = None) -> None:
        self._journal = journal
        self.port = 0

    def __enter__(self) -> Self:
        """Start the process, and wait until it listens."""
        command = [sys.executable, str(Path(__file__)), str(self.port), str(self._journal or "")]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the server has not started"
        self.port = int(line)
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        with self._process:
            self._process.kill()

    def kill(self) -> None:
        """Kill the process, and prove that it is dead."""
        with self._process:
            self._process.kill()
        assert self._process.returncode == -signal.SIGKILL

    def restart(self) -> None:
        """Start a process at the same port, with all that the one that was killed had in its journal."""
        assert self._journal is not None
        assert self._process.returncode is not None
        self.__enter__()

    @property
    def endpoint(self) -> str:
        """The URL to give to clients."""
        return f"http://127.0.0.1:{self.port}"

    def request(self, method: str, path: str, data: bytes | None = None) -> bytes:
        """Make a request past every client; raises `urllib.error.HTTPError`."""
        headers = {"Content-Type": "application/octet-stream", "Authorization": "AWS anybody:signature"}
        request = urllib.request.Request(f"{self.endpoint}/{path}", data, headers, method=method)  # noqa: S310 - ours
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
            content: bytes = answer.read()
            return content

    def require_signatures(self, *, required: bool) -> None:
        """Refuse, or accept again, requests of users whom the server does not know."""
        answer = json.loads(self.request("POST", "moto-api/reset-auth", b"0" if required else b"inf"))
        assert answer["status"] == "ok"


def _serve(port: int, journal: Path | None) -> None:
    """Serve for ever; the port goes to standard output."""
    import os  # noqa: PLC0415 - the server's process alone needs these
    import threading  # noqa: PLC0415

    os.environ["MOTO_S3_DEFAULT_MAX_KEYS"] = str(PAGE_SIZE)
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app  # noqa: PLC0415
    from werkzeug.serving import make_server  # noqa: PLC0415
    from werkzeug.wsgi import get_input_stream  # noqa: PLC0415

    moto = DomainDispatcherApplication(create_backend_app)
    lock = threading.Lock()

    def one_at_a_time(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        body = get_input_stream(environ).read()  # raises where the client has gone
        environ["wsgi.input"] = io.BytesIO(body)
        is_change = environ["REQUEST_METHOD"] not in ("GET", "HEAD")
        line = _line_of(environ, body) if journal is not None and is_change else b""
        with lock:
            answer = list(moto(environ, start_response))
            if journal is not None and is_change:
                with journal.open("ab", buffering=0) as file:  # in one call, so that no kill leaves half of it
                    file.write(line)
            return answer

    if journal is not None and journal.exists():
        for line in journal.read_text().splitlines():
            list(moto(_request_of(line), lambda *_: None))
    server = make_server("127.0.0.1", port, one_at_a_time, threaded=True)
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    server.serve_forever()


def _line_of(environ: dict[str, Any], body: bytes) -> bytes:
    """Return a request as a line of the journal."""
    plain = {name: value for name, value in environ.items() if isinstance(value, str)}
    return json.dumps({"environ": plain, "body": base64.b64encode(body).decode()}).encode() + b"\n"


def _request_of(line: str) -> dict[str, Any]:
    """Return the request that a line of the journal is of."""
    content = json.loads(line)
    return {
        **content["environ"],
        "wsgi.input": io.BytesIO(base64.b64decode(content["body"])),
        "wsgi.errors": sys.stderr,
    }


if __name__ == "__main__":
    _serve(int(sys.argv[1]), Path(sys.argv[2]) if sys.argv[2] else None)

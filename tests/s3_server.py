"""A real S3 server process: moto's, with each request under one lock.

Moto looks at a condition and writes in two steps, between which another thread may come; S3 does not. The lock gives
the server the atomicity that its model has; what a request does is moto's alone. The server keeps its objects in its
memory, answers at a free port, and ends with the test run.
"""

import json
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
    """The server, for the length of a `with`."""

    def __enter__(self) -> Self:
        """Start the process, and wait until it listens."""
        command = [sys.executable, str(Path(__file__))]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        with self._process:
            self._process.kill()

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


def _serve() -> None:
    """Serve for ever; the port goes to standard output."""
    import io  # noqa: PLC0415 - the server's process alone needs these
    import os  # noqa: PLC0415
    import threading  # noqa: PLC0415

    os.environ["MOTO_S3_DEFAULT_MAX_KEYS"] = str(PAGE_SIZE)
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app  # noqa: PLC0415
    from werkzeug.serving import make_server  # noqa: PLC0415
    from werkzeug.wsgi import get_input_stream  # noqa: PLC0415

    moto = DomainDispatcherApplication(create_backend_app)
    lock = threading.Lock()

    def one_at_a_time(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        environ["wsgi.input"] = io.BytesIO(get_input_stream(environ).read())  # raises where the client has gone
        with lock:
            return list(moto(environ, start_response))

    server = make_server("127.0.0.1", 0, one_at_a_time, threaded=True)
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    _serve()

"""Processes that do not import torch again: forked from one that has, each with its own pid, signals and exit status.

`start` and `run` take the command lines of Python that `subprocess` takes, `python -m MODULE` and `python -c CODE`,
and run them as a fresh interpreter would, some seconds of computing earlier. What they do not have is a command line
and an environment of their own in /proc.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from typing_extensions import Self

_lock = threading.Lock()
_control: list[socket.socket] = []
_PROGRAM: Final = "import sys; sys.path[0] = sys.argv.pop(1); import fork_server; fork_server.main()"


def can_run(arguments: Sequence[str]) -> bool:
    """Whether a command line is one of this Python's that a forked process can stand for."""
    return len(arguments) > 2 and arguments[0] == sys.executable and arguments[1] in ("-m", "-c")


class Process:
    """A forked process; what there is of `subprocess.Popen` means the same.

    Args:
        arguments: `[sys.executable, "-m" or "-c", ...]`.
        cwd: its working directory; this process's own by default.
        env: its environment; this process's own by default.
        stdin, stdout, stderr: file descriptors or files of its streams; `subprocess.PIPE`, `DEVNULL` or `STDOUT`.
        text: whether the pipes are for text.
        start_new_session: whether it leads a session and a process group of its own.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int | IO[bytes] | None = None,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        text: bool = False,
        start_new_session: bool = False,
    ) -> None:
        assert can_run(arguments), arguments
        self.args = arguments
        self.returncode: int | None = None
        self.stdin: IO[str] | IO[bytes] | None = None
        self.stdout: IO[str] | IO[bytes] | None = None
        self.stderr: IO[str] | IO[bytes] | None = None
        request = {
            "arguments": [str(argument) for argument in arguments[1:]],
            "cwd": str(Path(cwd or Path.cwd()).resolve()),
            "environment": dict(os.environ if env is None else env),
            "new_session": start_new_session,
        }
        self._status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        opened, streams = [], []
        for number, (name, wanted) in enumerate((("stdin", stdin), ("stdout", stdout), ("stderr", stderr))):
            if wanted == subprocess.PIPE:
                ends = os.pipe()
                here, there = ends if number else ends[::-1]
                mode = ("r" if number else "w") + ("" if text else "b")
                setattr(self, name, os.fdopen(here, mode))
                opened.append(there)
                streams.append(there)
            elif wanted == subprocess.DEVNULL:
                opened.append(os.open(os.devnull, os.O_RDWR))
                streams.append(opened[-1])
            elif wanted == subprocess.STDOUT:
                streams.append(streams[1])
            elif wanted is None:
                streams.append(number)
            else:
                streams.append(wanted if isinstance(wanted, int) else wanted.fileno())
        with theirs, _lock:
            socket.send_fds(_server(), [json.dumps(request).encode()], [theirs.fileno(), *streams])
        for descriptor in opened:
            os.close(descriptor)
        self.pid = self._hear()

    def _hear(self) -> int:
        said = self._status.recv(32)
        assert said, "the fork server is gone"
        return int(said)

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self._end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return the exit status."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout)
            self._end()
        assert self.returncode is not None
        return self.returncode

    def _end(self) -> None:
        self.returncode = self._hear()
        self._status.close()

    def send_signal(self, number: int) -> None:
        """Send a signal to it if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to it if it still runs."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()


def run(
    arguments: Sequence[str],
    *,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    check: bool = False,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Run a process to its end, with what it prints in text; as `subprocess.run` with `capture_output`."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = Process(arguments, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
        try:
            process.wait(timeout)
        finally:
            process.kill()
            process.wait()
        printed = []
        for file in (output, errors):
            file.seek(0)
            printed.append(file.read().decode(errors="replace"))
    done = subprocess.CompletedProcess(arguments, process.wait(), *printed)
    if check:
        assert done.returncode == 0, done.stderr
    return done


def _server() -> socket.socket:
    """Return the connection to the server, which is started by the first who asks."""
    if not _control:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
        # numpy's own linear algebra, which nothing here uses, would start threads when it is loaded.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            server = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(Path(__file__).parent), str(theirs.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        _control.append(ours)
        atexit.register(_stop, server)
    return _control[0]


def _stop(server: subprocess.Popen[bytes]) -> None:
    _control.pop().close()
    server.wait(10)

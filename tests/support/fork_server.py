"""A program that has imported torch once, and forks a child for each request; `forked.py` starts it and asks.

Invariant: it stays single-threaded, because a child inherits one thread only: of a pool of threads it would inherit
the locks, and hang. So it imports and forks, and computes nothing. A child is what a fresh interpreter would be: the
modules of this repository and those of torchrun are imported in the child, where torchrun's entry points are loaded,
and faults are injected.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Final, NoReturn

PRELOADED: Final = ("torch", "torch.distributed", "torch.optim", "torch._dynamo", "numpy", "structlog", "fsspec")
"""What a job imports and nobody changes: no `torch.distributed.elastic`, which loads the plug-in at its import."""

_NOT_PRELOADED: Final = ("elastic_mnist", "torch.distributed.elastic", "torch.distributed.run")
_NUM_BYTES: Final = 1 << 18  # of a request


def serve(control: socket.socket) -> dict[str, Any]:
    """Fork a child for each request until nobody can ask any more; in a child, return its request."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    children: dict[int, tuple[int, socket.socket]] = {}  # by the file descriptor of each
    while True:
        for ready, _ in poll.poll():
            if ready in children:
                poll.unregister(ready)
                pid, status = children.pop(ready)
                _tell(status, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                status.close()
                os.close(ready)
                continue
            message, descriptors, _, _ = socket.recv_fds(control, _NUM_BYTES, 4)
            if not message:
                sys.exit()
            assert len(os.listdir("/proc/self/task")) == 1, "the fork server has threads"  # noqa: PTH208
            status = socket.socket(fileno=descriptors[0])
            pid = os.fork()
            if pid == 0:
                for opened in (control, status, *(other for _, other in children.values())):
                    opened.close()
                for opened_too in children:
                    os.close(opened_too)
                for number, descriptor in enumerate(descriptors[1:]):
                    os.dup2(descriptor, number)
                    os.close(descriptor)
                return dict(json.loads(message))
            for descriptor in descriptors[1:]:
                os.close(descriptor)
            _tell(status, pid)
            ended = os.pidfd_open(pid)
            children[ended] = pid, status
            poll.register(ended, select.POLLIN)


def _tell(status: socket.socket, number: int) -> None:
    try:
        status.send(str(number).encode())
    except OSError:  # whoever asked is gone
        return


def settle(request: dict[str, Any]) -> None:
    """Become the process that was asked for, up to the point where an interpreter runs its program."""
    if request["new_session"]:
        os.setsid()
    os.chdir(request["cwd"])
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(request["environment"])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    tempfile.tempdir = None
    is_module, *arguments = request["arguments"]
    sys.orig_argv[1:] = request["arguments"]
    sys.path[:] = [request["cwd"] if is_module == "-m" else "", *paths, *(p for p in sys.path[1:] if p not in before)]
    importlib.invalidate_caches()
    sys.argv[:] = arguments if is_module == "-m" else ["-c", *arguments[1:]]
    if any((Path(path) / "sitecustomize.py").exists() for path in paths):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")


def run(kind: str, program: str) -> int:
    """Run a program in `__main__` as an interpreter would; return the exit status."""
    module = sys.modules["__main__"].__dict__
    for name in [name for name in module if not name.startswith("__")]:
        del module[name]
    try:
        if kind == "-m":
            runpy._run_module_as_main(program)  # type: ignore[attr-defined] # what `python -m` calls
        else:
            exec(compile(program, "<string>", "exec"), module)  # noqa: S102 - what `python -c` does
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 - its hook is what a test may be about
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def end(status: int) -> NoReturn:
    """End the process as an interpreter does, but for its taking torch's modules apart, which is most of a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def main() -> None:
    """Serve, and in a child run what was asked for."""
    for name in PRELOADED:
        importlib.import_module(name)
    wrong = [name for name in sys.modules if name.startswith(_NOT_PRELOADED)]
    assert not wrong, f"{wrong} would not be imported in the child"
    gc.collect()
    gc.freeze()
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    settle(request)
    end(run(*request["arguments"][:2]))

"""The event log: what happened, what it cost and why, in one place.

Invariant: one JSON object a line, one write a line, appended and never rewritten, so that lines of
several processes and of several lives of the job never mix. Global rank 0 tells all; the other ranks
only warnings and errors. Every other part of the package reports through `log` and knows nothing of
files or formats.
"""

import contextlib
import errno
import json
import logging
import math
import os
import select
import sys
import time
from collections.abc import Mapping, MutableMapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final, TextIO

import structlog

from elastic_mnist.errors import print_message

_HEAD: Final = ("timestamp", "level", "event", "run_id", "generation", "rank", "world_size")

_READER_SECONDS: Final = 0.5
_FILE_ONLY: Final = frozenset({"run_id", "rank", "settings", "versions", "argv"})


class _Identity:
    """Who speaks: the keys that every line carries. One a process, set as they become known."""

    def __init__(self) -> None:
        self.keys: dict[str, Any] = dict.fromkeys(_HEAD[3:])
        self.step: int | None = None

    def __call__(self, _logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        return {**self.keys, **event}


class _JsonLines:
    """The last stop before the console: appends each event to the log file.

    The file is opened at the first event, so that a process with nothing to say leaves it as it is.
    A log that cannot be written never stops the training: it is said once, on standard error. A disk that is
    full may be so for a moment, while a snapshot is tried there: the next event is tried again.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._is_told = False

    def stop(self) -> None:
        self._path = None

    def __call__(self, _logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event = {key: event[key] for key in (*_HEAD, *event) if key in event}
        if self._path is not None:
            try:
                self._append(self._path, (json.dumps(_as_json(event), default=str) + "\n").encode())
                self._is_told = False
            except OSError as error:
                self._fail(self._path, error)
        return event

    def _fail(self, path: Path, error: OSError) -> None:
        """Say that events are missing, and leave the file for good where that will not pass."""
        if not self._is_told:
            print_message(f"warning: event log {path}: {error.strerror}; going on without")
        self._is_told = True
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            self._path = None
        else:
            self.close()  # opened anew, it is looked at for half a line

    def close(self) -> None:
        """Close the file; the next event opens it anew. Two threads may do so at once."""
        descriptor, self._descriptor = self._descriptor, None
        with contextlib.suppress(OSError):
            if descriptor is not None:
                os.close(descriptor)

    def _append(self, path: Path, line: bytes) -> None:
        if self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0:
            self.close()  # somebody has removed or replaced the file
        if self._descriptor is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if _ends_torn(self._descriptor):
                line = b"\n" + line
        written = os.write(self._descriptor, line)
        if written < len(line):
            self._append(path, line[written:])  # a rest that does not fit either raises the reason


class _Stream:
    """Standard output or error as structlog's sink; a reader that has gone away is no error."""

    def __init__(self, *, to_stderr: bool) -> None:
        self._file: TextIO | None = sys.stderr if to_stderr else sys.stdout  # None where it was closed at the start

    def msg(self, line: str) -> None:
        if self._file is None or not self._is_ready():
            return
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except (OSError, ValueError):  # a broken pipe, a full disk, a closed file
            return

    def _is_ready(self) -> bool:
        """Whether somebody reads. A paused terminal must not hold up the training; the file has it all."""
        try:
            assert self._file is not None
            return bool(select.select([], [self._file], [], _READER_SECONDS)[1])
        except (OSError, ValueError, TypeError):  # what has no descriptor is ready
            return True

    debug = info = warning = error = critical = msg


def _ends_torn(descriptor: int) -> bool:
    """Whether a log ends in half a line, as a full disk or a lost machine leaves it.

    Looked at twice, because another process may be in the middle of a write.
    """
    for _ in range(2):
        size = os.fstat(descriptor).st_size
        if not size or os.pread(descriptor, 1, size - 1) == b"\n":
            return False
        time.sleep(0.05)
    return os.fstat(descriptor).st_size == size


def _as_json(value: Any) -> Any:  # noqa: ANN401 - the values of a JSON object
    """Spell numbers that JSON does not have as texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _as_json(member) for key, member in value.items()}
    return [_as_json(member) for member in value] if isinstance(value, (list, tuple)) else value


def _for_people(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Shorten an event to what a person at the terminal reads; the file has all of it."""
    shown = {key: value for key, value in event.items() if key not in _FILE_ONLY}
    shown["timestamp"] = str(event["timestamp"])[11:19]
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in shown.items()}


class _Bridge(logging.Handler):
    """Carries the standard library's records of this package into the event log.

    The modules that the torchrun agent uses too, where no event log exists, speak through `logging`;
    their messages begin with the event's name.
    """

    def emit(self, record: logging.LogRecord) -> None:
        name, _, detail = record.getMessage().partition(" ")
        log.log(record.levelno, name, detail=detail)


_identity = _Identity()
_file = _JsonLines(None)
log: Final[structlog.typing.FilteringBoundLogger] = structlog.get_logger()
"""Speaks for this process: `log.info("run.started", epochs=5)`."""


def configure(path: Path | None, *, rank: int, world_size: int, log_format: str) -> None:
    """Open the event log for this process.

    Args:
        path: the file to append to; None for none.
        rank: this process's global rank; above 0, only warnings and errors are told, on standard error.
        world_size: number of processes of this generation.
        log_format: "auto", "console" or "json", for the console.
    """
    global _file  # noqa: PLW0603 - one event log a process
    _file = _JsonLines(path)
    identify(rank=rank, world_size=world_size)
    stream: TextIO | None = sys.stdout if rank == 0 else sys.stderr
    plain = log_format == "json" or (log_format == "auto" and (stream is None or not stream.isatty()))
    renderers = (
        [structlog.processors.JSONRenderer(default=str)]
        if plain
        else [_for_people, structlog.dev.ConsoleRenderer(sort_keys=False, pad_event_to=18)]
    )
    level = logging.INFO if rank == 0 else logging.WARNING
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _identity,
            _file,
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: _Stream(to_stderr=rank != 0),
    )
    package = logging.getLogger("elastic_mnist")
    package.handlers = [_Bridge()]
    package.setLevel(level)
    package.propagate = False


def at_step(step: int | None = None) -> int | None:
    """Note the step this process is at, if one is given; return the last one noted, for `run.failed`."""
    if step is not None:
        _identity.step = step
    return _identity.step


def identify(**keys: Any) -> None:  # noqa: ANN401 - the values of a JSON object
    """Set keys that every later line of this process carries: `run_id`, `generation` and the like."""
    _identity.keys.update(keys)


def console_only() -> None:
    """Leave the file as it is from here on: what there is to say stands in it already."""
    _file.stop()


def append(path: Path, event: dict[str, Any]) -> None:
    """Tell an event from a process that has no event log of its own: the launcher's agent."""
    line = {"timestamp": datetime.now(timezone.utc).isoformat().replace("+00:00", "Z"), **event}
    lines = _JsonLines(path)
    lines(None, "", line)
    lines.close()
    with contextlib.suppress(AttributeError, OSError, ValueError):  # nobody reads it, and whoever tells must go on
        sys.stderr.write(json.dumps(_as_json(line), default=str) + "\n")

"""What a job has left behind: its processes, and files in shared memory.

A process of a job is known by its environment, which all of its descendants inherit.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

JOB_VARIABLE: Final = "ELASTIC_MNIST_CHAOS_JOB"
"""The job's directory, in the environment of each of its processes."""

_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - looked at, and nothing is made there


def processes(directory: Path) -> list[int]:
    """Return the ids of the living processes of the job in a directory, this one left out."""
    return [pid for pid in _all_processes() if pid != os.getpid() and _is_of(pid, directory)]


def shared_memory(names: frozenset[str]) -> list[str]:
    """Return the files in shared memory that have one of some names in theirs."""
    with contextlib.suppress(OSError):
        return sorted(path.name for path in _SHARED_MEMORY.iterdir() if any(name in path.name for name in names))
    return []


def temporary_files(directory: Path) -> list[str]:
    """Return the temporary files beneath a directory."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*.tmp"))


def kill(directory: Path) -> None:
    """Kill all processes of the job in a directory, and those that they start meanwhile."""
    while True:
        found = processes(directory)
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _all_processes() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def _is_of(pid: int, directory: Path) -> bool:
    """Whether a process is of the job; one that is dead and not yet buried is of none."""
    place = Path("/proc") / str(pid)
    try:
        is_dead = (place / "stat").read_text().rpartition(")")[2].split()[0] in {"Z", "X"}
        entries = (place / "environ").read_bytes().split(b"\0")
        return not is_dead and f"{JOB_VARIABLE}={directory}".encode() in entries
    except (OSError, IndexError):  # gone meanwhile, or another user's
        return False

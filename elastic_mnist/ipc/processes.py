"""Which process is meant by a number: ids are used again, and mean something on one host only."""

import contextlib
import os
import socket
from pathlib import Path


def host() -> str:
    """Name this machine, since it was started, and its space of process ids."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(parts)


def own() -> tuple[str, int, int | None]:
    """Return this process's host, id and beginning."""
    return host(), os.getpid(), started(os.getpid())


def children() -> list[int]:
    """Return the processes that this one has started and not yet buried; none where the system does not say."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for path in Path("/proc/self/task").glob("*/children"):
            found += map(int, path.read_text().split())
    return found


def started(pid: int) -> int | None:
    """Return the tick at which a process began; None where it is dead, or where the system does not say."""
    state = _stat(pid)
    return None if not state or state[0] == "Z" else int(state[19])


def condition(pid: int) -> str:
    """Return what a process is doing, as the system sees it, for people."""
    names = {"R": "running", "S": "sleeping", "D": "waiting for a device", "T": "stopped", "t": "traced", "Z": "dead"}
    state = _stat(pid)
    return names.get(state[0], state[0]) if state else "dead"


def _stat(pid: int) -> list[str]:
    """Return the fields of proc(5)'s stat behind the name, from the state on; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []

"""What a job has left behind: its processes, its memory and its temporary files.

A process of a job is known by its environment, which all of its descendants inherit. Memory that is shared lies in
files without a name (memfd_create), which end with the last process that has them open: they are known by their
inodes, which are looked up while an agent holds them.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

JOB_VARIABLE: Final = "ELASTIC_MNIST_CHAOS_JOB"
"""The job's directory, in the environment of each of its processes."""

TMPDIR: Final = "tmp"
"""In a job's directory, the one for temporary files of its processes."""

KILL_SECONDS: Final = 30.0
"""A process that is not dead so long after SIGKILL hangs in the kernel."""

_MEMORY: Final = "/memfd:elastic_mnist"
_POLL_SECONDS: Final = 0.005


def processes(directory: Path) -> list[int]:
    """Return the ids of the living processes of the job in a directory, this one left out."""
    return [pid for pid in _all_processes() if pid != os.getpid() and _is_of(pid, directory)]


def memory(pid: int) -> set[int]:
    """Return the inodes of the files without a name that a process has open for its job."""
    return set(_open_memory(pid))


def holders(inodes: set[int]) -> list[str]:
    """Return which processes, whosever they are, still have some files without a name open or mapped."""
    return [f"held by process {pid}" for pid in _all_processes() if inodes & {*_open_memory(pid), *_mapped_memory(pid)}]


def temporary_files(directory: Path) -> list[str]:
    """Return the temporary files beneath a directory, and what lies in its TMPDIR and is not torch's."""
    tmpdir = directory / TMPDIR
    found = {*directory.rglob("*.tmp"), *(path for path in tmpdir.rglob("*") if not _is_torchs(path, tmpdir))}
    return sorted(str(path.relative_to(directory)) for path in found)


def kill(directory: Path, *, within: float = KILL_SECONDS) -> list[int]:
    """Kill all processes of the job in a directory, and those that they start meanwhile; return who does not end."""
    deadline = time.monotonic() + within
    while True:
        found = processes(directory)
        if not found or time.monotonic() > deadline:
            return found
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _is_torchs(path: Path, tmpdir: Path) -> bool:
    """Whether torch itself leaves that in TMPDIR.

    An agent makes a directory for its workers' logs, where a worker that fails leaves an error file, and never removes
    it. The compiler makes its cache's directory when it is imported; nothing is compiled.
    """
    if path.relative_to(tmpdir).parts[0].startswith("torchelastic_"):
        return path.is_dir() or path.name == "error.json"
    return path.parent == tmpdir and path.is_dir() and path.name.startswith("torchinductor_")


def _open_memory(pid: int) -> Iterator[int]:
    """Yield the inode of each file without a name that a process has open."""
    with contextlib.suppress(OSError):  # gone meanwhile, or another user's
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(path.readlink()).startswith(_MEMORY):
                    yield path.stat().st_ino


def _mapped_memory(pid: int) -> Iterator[int]:
    """Yield the inode of each that it has mapped; see proc(5) for the fields."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(_MEMORY):  # noqa: PLR2004
                yield int(fields[4])


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

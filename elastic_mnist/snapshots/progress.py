"""How far a generation came: a small local file that rank 0 rewrites after every step.

It is not synced: it survives the death of its process, at the cost of some microseconds, and tells the next generation
how many steps were lost, and whether this one was stopped or failed.
"""

import contextlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from elastic_mnist.snapshots.record import RunRecord

_STOPPED: Final = "stopped"


@dataclass(frozen=True, kw_only=True)
class LastProgress:
    """What the progress file says of the last generation.

    Attributes:
        step: number of steps finished.
        is_stopped: whether it was asked to stop: for a membership change, or by someone else than its launcher.
    """

    step: int
    is_stopped: bool


class ProgressFile:
    """The progress of one generation, in a local file. One that cannot be written is done without.

    Args:
        path: of the file; None for none.
        record: the run and the generation.
    """

    def __init__(self, path: Path | None, record: RunRecord) -> None:
        self._path = path
        self._generation = f"{record.run_id} {record.generation}"
        self._step = record.began_at or 0
        self._is_stopped = False
        self._descriptor: int | None = None
        self._lock = threading.Lock()

    def set(self, step: int) -> None:
        """Write that `step` steps are finished."""
        with self._lock:
            self._step = step
            self._write()

    def stop(self) -> None:
        """Write that this generation was asked to stop; from any thread, also before its first step."""
        with self._lock:
            self._is_stopped = True
            self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        with contextlib.suppress(OSError):
            if self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0:  # the file was removed
                os.close(self._descriptor)
                self._descriptor = None
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            ending = f" {_STOPPED}" if self._is_stopped else ""
            os.pwrite(self._descriptor, f"{self._generation} {self._step:012d}{ending}\n".encode(), 0)

    @staticmethod
    def read(path: Path, record: RunRecord) -> LastProgress | None:
        """Return how far the recorded generation came, None where the file is missing or another generation's."""
        try:
            run_id, generation, step, *ending = path.read_text().split()
            if (run_id, generation) != (record.run_id, str(record.generation)) or ending not in ([], [_STOPPED]):
                return None
            return LastProgress(step=int(step), is_stopped=bool(ending))
        except (OSError, ValueError):
            return None

    @staticmethod
    def remove(path: Path) -> None:
        """Remove the file: the run is finished."""
        with contextlib.suppress(OSError):
            path.unlink()

"""How far a run came: a small local file that rank 0 rewrites after every step."""

import contextlib
import os
from pathlib import Path

from elastic_mnist.snapshots.record import RunRecord


class ProgressFile:
    """How far a generation came: the number of finished steps, in a local file.

    Args:
        path: of the file; None for none.
        generation: the generation that writes.
        run_id: its run.
    """

    def __init__(self, path: Path | None, *, run_id: str, generation: int) -> None:
        self._path = path
        self._who = f"{run_id} {generation}"
        self._descriptor: int | None = None

    def set(self, step: int) -> None:
        """Note that `step` steps are finished. A mark that cannot be written is done without."""
        if self._path is None:
            return
        with contextlib.suppress(OSError):
            if self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0:  # somebody has removed it
                os.close(self._descriptor)
                self._descriptor = None
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            os.pwrite(self._descriptor, f"{self._who} {step:012d}\n".encode(), 0)

    @staticmethod
    def read(path: Path, record: RunRecord) -> int | None:
        """Return how far the last generation came, None where the mark is missing or another's."""
        try:
            run_id, generation, step = path.read_text().split()
            return int(step) if (run_id, generation) == (record.run_id, str(record.generation)) else None
        except (OSError, ValueError):
            return None

    @staticmethod
    def remove(path: Path) -> None:
        """Remove the file: the run is finished."""
        with contextlib.suppress(OSError):
            path.unlink()

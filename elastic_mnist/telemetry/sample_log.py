"""The ledger of samples: which rank used which samples in which step.

One file a rank, `rank-00001.jsonl`, appended across generations; one line a micro-batch, one write a step. A
line says that a rank computed, not that the step counted: what was committed follows from the event log. See
`tools.audit`.
"""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from elastic_mnist.errors import UsageError
from elastic_mnist.telemetry.events import log


class SampleLog:
    """Appends what this rank uses.

    Args:
        directory: made if missing.
        rank: this rank.
        run_id: of the run.
        generation: of the workers.

    Raises:
        UsageError: the directory cannot be written.
    """

    def __init__(self, directory: Path, *, rank: int, run_id: str, generation: int) -> None:
        self._head = {"run_id": run_id, "generation": generation, "rank": rank}
        self._is_broken = False
        self._path = path = directory / f"rank-{rank:05d}.jsonl"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._end_torn_line()
        except OSError as error:
            raise UsageError(
                f"--sample_log {directory}: {error.strerror}; choose a directory that can be written"
            ) from error

    def append(self, *, epoch: int, step: int, micro_batches: Mapping[int, Sequence[int]]) -> None:
        """Append this rank's micro-batches of a step.

        Args:
            epoch: of the step.
            step: number of steps finished before it.
            micro_batches: by their index among the step's, the indices of their samples.
        """
        lines = [
            json.dumps({**self._head, "epoch": epoch, "step": step, "micro_batch": index, "indices": list(samples)})
            for index, samples in micro_batches.items()
        ]
        if lines:
            self._append(("\n".join(lines) + "\n").encode())

    def _append(self, text: bytes) -> None:
        """Write; a ledger that cannot be written is told once, and never stops the training."""
        if self._is_broken:
            return
        try:
            while text:
                text = text[os.write(self._descriptor, text) :]
        except OSError as error:
            self._is_broken = True
            log.warning("ledger.failed", path=str(self._path), reason=error.strerror)

    def _end_torn_line(self) -> None:
        """End a line that a lost machine left half-written, so that the next one stands alone."""
        with contextlib.suppress(OSError):
            size = os.fstat(self._descriptor).st_size
            if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                os.write(self._descriptor, b"\n")

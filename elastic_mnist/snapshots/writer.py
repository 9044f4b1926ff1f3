"""Durable snapshots beside the training: one thread writes what it is given.

Invariant: at most one snapshot is being written and at most one waits, the newest; training never waits for a write
except at its end. A write that fails is logged and retried with growing pauses. Once the tries are used up, that
snapshot has failed; when too many in a row have failed, or the last one of the job, training stops. A write that
neither ends nor fails counts as one more failure each time the limit passes.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from elastic_mnist.errors import StoreError, TrainingError, UsageError
from elastic_mnist.telemetry.events import log

_NUM_TRIES: Final = 4
_FIRST_PAUSE_SECONDS: Final = 0.5
_LONGEST_PAUSE_SECONDS: Final = 10.0
_LONGEST_SECONDS: Final = 600.0
_CLOSE_SECONDS: Final = 5.0
_NICENESS: Final = 5  # the threads that compute go first


@dataclass(frozen=True, kw_only=True)
class Write:
    """A snapshot to be written.

    Attributes:
        step: of the state.
        path: where it goes.
        run: writes it; raises `StoreError` where it cannot.
    """

    step: int
    path: str
    run: Callable[[], None]


class BackgroundWriter:
    """Writes durable snapshots in a thread of its own.

    Args:
        max_failures: snapshots in a row that may fail before the training stops.
    """

    def __init__(self, *, max_failures: int) -> None:
        self._max_failures = max_failures
        self._changed = threading.Condition()
        self._waiting: Write | None = None
        self._writing: Write | None = None
        self._writing_since = 0.0
        self._num_failures = 0
        self._error: BaseException | None = None
        self._last_failure: StoreError | None = None
        self._thread: threading.Thread | None = None

    def submit(self, write: Write) -> None:
        """Hand over a snapshot; it supersedes one that still waits."""
        with self._changed:
            if self._waiting is not None:
                log.warning(
                    "snapshot.superseded",
                    step=self._waiting.step,
                    path=self._waiting.path,
                    reason=f"the one before it is still being written, and that of step {write.step} is newer",
                )
            self._waiting = write
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="snapshot-writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def check(self) -> None:
        """Raise what must stop the training: too many failures, or a lost lease."""
        with self._changed:
            self._notice_hang()
            if self._error is not None:
                raise self._error

    def flush(self, seconds: float | None = None) -> None:
        """Wait until all that was handed over is written, at most `seconds`.

        Raises:
            TrainingError: the newest could not be saved.
        """
        seconds = _LONGEST_SECONDS if seconds is None else seconds
        with self._changed:
            is_flushed = self._changed.wait_for(
                lambda: self._error is not None or not (self._waiting or self._writing), timeout=seconds
            )
            if not is_flushed:
                raise TrainingError(f"the last snapshot could not be saved within {seconds:.0f} s")
            if self._error is not None:
                raise self._error
            if self._last_failure is not None:
                raise TrainingError(f"the last snapshot could not be saved: {self._last_failure}")

    def close(self) -> None:
        """Wait a few seconds for what was handed over, and ignore its failures: training has ended."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._waiting or self._writing), timeout=_CLOSE_SECONDS)

    def _work(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # on Linux, a thread's own
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None)
                write, self._waiting = self._waiting, None
                self._writing, self._writing_since = write, time.monotonic()
            assert write is not None
            failure: StoreError | None = None
            error: BaseException | None = None
            try:
                with_retries(write)
            except StoreError as raised:
                failure = raised
                log.error("snapshot.failed", step=write.step, path=write.path, reason=str(raised))
            except BaseException as raised:  # noqa: BLE001 - carried to the thread that trains
                error = raised
            with self._changed:
                self._writing = None
                self._last_failure = failure
                if failure is None:
                    self._num_failures = 0
                else:
                    self._count(failure)
                self._error = self._error or error
                self._changed.notify_all()

    def _notice_hang(self) -> None:
        """Count a write that has taken too long; it may never end."""
        if self._writing is None or time.monotonic() - self._writing_since < _LONGEST_SECONDS:
            return
        self._writing_since = time.monotonic()
        failure = StoreError(f"{self._writing.path}: the write has not ended within {_LONGEST_SECONDS:.0f} s")
        log.error("snapshot.failed", step=self._writing.step, path=self._writing.path, reason=str(failure))
        self._count(failure)

    def _count(self, failure: StoreError) -> None:
        self._num_failures += 1
        if self._num_failures > self._max_failures:
            self._error = self._error or UsageError(  # not one that a restart could mend
                f"{self._num_failures} snapshots in a row could not be saved, --max_snapshot_failures allows "
                f"{self._max_failures}: {failure}"
            )


def with_retries(write: Write) -> None:
    """Write; raises the last `StoreError` once the tries are used up."""
    import tenacity  # noqa: PLC0415 - here it is imported beside the training; at the top, a restart would wait for it

    def log_retry(state: tenacity.RetryCallState) -> None:
        assert state.outcome is not None
        log.warning("snapshot.retried", step=write.step, path=write.path, reason=str(state.outcome.exception()))

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(StoreError),
        stop=tenacity.stop_after_attempt(_NUM_TRIES),
        wait=tenacity.wait_exponential(multiplier=_FIRST_PAUSE_SECONDS, max=_LONGEST_PAUSE_SECONDS),
        before_sleep=log_retry,
        reraise=True,
    )
    retrying(write.run)

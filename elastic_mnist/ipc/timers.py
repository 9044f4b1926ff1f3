"""How long a value has not changed, and a thread that looks at something again and again."""

import threading
import time
from collections.abc import Callable
from typing import Final

_GAP_SECONDS: Final = 2.0
"""A process that did not run for so long was stopped, or its machine was: it knows nothing of the others."""


class StallTimer:
    """For how long a value has not changed, as far as this process can tell.

    Args:
        gap_seconds: after so long without a look, the count begins anew.
    """

    def __init__(self, gap_seconds: float = _GAP_SECONDS) -> None:
        self._gap_seconds = gap_seconds
        self._value: object = None
        self._since = self._looked = time.monotonic()

    def seconds(self, value: object) -> float:
        """Look at a value; return for how many seconds it has been the same."""
        now = time.monotonic()
        if value != self._value or now - self._looked > self._gap_seconds:
            self._value, self._since = value, now
        self._looked = now
        return now - self._since


class PeriodicThread:
    """Calls a function in a daemon thread, at once and then at intervals, until it is stopped.

    An exception that leaves the function ends the thread.

    Args:
        name: of the thread.
        interval_seconds: between the end of a call and the next one.
        tick: the function.
    """

    def __init__(self, name: str, interval_seconds: float, tick: Callable[[], object]) -> None:
        self._interval_seconds = interval_seconds
        self._tick = tick
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin; whatever `tick` uses must be there."""
        self._thread.start()

    def stop(self, timeout_seconds: float) -> bool:
        """Call no more, and wait for a call that has begun; return whether it has ended within the timeout."""
        self._is_stopped.set()
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while not self._is_stopped.is_set():
            self._tick()
            self._is_stopped.wait(self._interval_seconds)

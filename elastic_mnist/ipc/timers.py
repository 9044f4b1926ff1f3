"""How long something has not changed, as far as one process can tell."""

import time
from typing import Final

_GAP_SECONDS: Final = 2.0
"""Whoever was not run for so long, because the machine or the process was stopped, knows nothing of the others."""


class StallTimer:
    """For how long something has not changed, as far as this process can tell.

    Args:
        gap_seconds: after so long without a look, nothing is concluded.
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

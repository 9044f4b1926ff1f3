"""The agent's watch over its own workers: whoever gives no sign of life is told, killed, and so replaced.

Runs in a thread of the torchrun agent. A process that is stopped (SIGSTOP), or wedged with the interpreter's lock held,
cannot help itself, and the launcher sees nothing: it is there. Its peers, on whatever node, notice that it is gone as
soon as it is killed. See `pulse` for the signs.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Final

from elastic_mnist import processes, pulse
from elastic_mnist.pulse import Sign, Stillness

_POLL_SECONDS: Final = 0.25
_OWN_SECONDS: Final = 2.0
"""A process that spins ends itself, and knows better where it stood; so much longer it has."""
_STACK_SECONDS: Final = 1.0
_STACK_BYTES: Final = 8192


class Warden:
    """Watches the workers that write to one table.

    Args:
        hang_timeout: seconds without a sign of life after which a worker is killed.
        event_log: where that is told.
    """

    def __init__(self, *, hang_timeout: float, event_log: Path) -> None:
        self._hang_timeout = hang_timeout
        self._event_log = event_log
        self._descriptor = os.memfd_create("elastic_mnist.pulse")
        os.ftruncate(self._descriptor, pulse.TABLE_SIZE)
        self._beats: dict[int, Stillness] = {}
        self._done: dict[int, Stillness] = {}
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        threading.Thread(target=self._watch, name="warden", daemon=True).start()

    def announce(self, num_nodes_waiting: int) -> None:
        """Let the workers know how many nodes wait to join."""
        pulse.announce(self._descriptor, num_nodes_waiting)

    @property
    def is_refused(self) -> bool:
        """Whether a worker has said that starting it again is of no use."""
        return pulse.num_refusals(self._descriptor) > 0

    def _watch(self) -> None:
        while True:
            try:
                for sign in pulse.read(self._descriptor):
                    if processes.started(sign.pid) == sign.pid_started:
                        self._look(sign)
            except Exception:
                # Whatever it was: those who watch must not be the first to fall asleep.
                logging.getLogger(__name__).exception("warden.failed")
            time.sleep(_POLL_SECONDS)

    def _look(self, sign: Sign) -> None:
        beats = self._beats.setdefault(sign.pid, Stillness()).seconds((sign.pid_started, sign.num_beats))
        done = self._done.setdefault(sign.pid, Stillness()).seconds((sign.pid_started, sign.num_done, sign.phase))
        limit = self._hang_timeout if sign.step >= 0 else max(self._hang_timeout, pulse.SETTING_UP_SECONDS)
        if beats > limit:
            self._end(sign, f"no sign of life for {beats:.0f} s")
        elif sign.phase == pulse.COMPUTING and done > limit + _OWN_SECONDS:
            self._end(sign, f"no progress for {done:.0f} s")

    def _end(self, sign: Sign, reason: str) -> None:
        condition = processes.condition(sign.pid)
        try:
            stack = _stack_of(sign)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(sign.pid, signal.SIGKILL)
        self._beats.pop(sign.pid)
        self._done.pop(sign.pid)
        from elastic_mnist import events  # noqa: PLC0415 - most agents never have anything to tell

        events.append(
            self._event_log,
            {
                "level": "error",
                "event": "worker.hung",
                "run_id": sign.run_id or None,
                "generation": sign.generation,
                "rank": sign.rank,
                "world_size": sign.world_size,
                "reason": f"{reason} while {sign.phase}; killed",
                "step": sign.step,
                "pid": sign.pid,
                "condition": condition,
                "stack": stack,
            },
        )


def _stack_of(sign: Sign) -> str | None:
    """Return the stack of a worker that can still answer a signal."""
    if sign.stack_descriptor < 0 or processes.condition(sign.pid) == "stopped":
        return None
    path, stack = Path(f"/proc/{sign.pid}/fd/{sign.stack_descriptor}"), b""
    deadline = time.monotonic() + _STACK_SECONDS
    with contextlib.suppress(OSError):
        os.kill(sign.pid, signal.SIGUSR2)
        while time.monotonic() < deadline and (not stack or stack != path.read_bytes()):
            stack = path.read_bytes()
            time.sleep(_POLL_SECONDS / 5)
    return stack[:_STACK_BYTES].decode(errors="replace") or None

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
from typing import Any, Final

from elastic_mnist.ipc import heartbeat, processes
from elastic_mnist.ipc.heartbeat import HeartbeatRecord
from elastic_mnist.ipc.timers import PeriodicThread, StallTimer

_POLL_SECONDS: Final = 0.25
_OWN_SECONDS: Final = 2.0
"""A process that spins ends itself, and knows better where it stood; so much longer it has."""
_STACK_SECONDS: Final = 1.0
_CLOSE_SECONDS: Final = 5.0
_STACK_BYTES: Final = 8192


class Watchdog:
    """Watches the workers that write to one table, until it is closed.

    Args:
        hang_timeout: seconds without a sign of life after which a worker is killed.
        event_log: where that is told.
    """

    def __init__(self, *, hang_timeout: float, event_log: Path) -> None:
        self._hang_timeout = hang_timeout
        self._event_log = event_log
        self._descriptor = os.memfd_create("elastic_mnist.ipc.heartbeat")
        os.ftruncate(self._descriptor, heartbeat.TABLE_SIZE)
        self._patience_at_birth = max(hang_timeout, heartbeat.SETTING_UP_SECONDS)
        self._beats: dict[int, StallTimer] = {}
        self._unborn: dict[int, StallTimer] = {}
        self._done: dict[int, StallTimer] = {}
        self._lock = threading.Lock()
        self._lost: dict[int, int] = {}  # told already: process id and beginning
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self._thread = PeriodicThread("watchdog", _POLL_SECONDS, self._look)
        self._thread.start()

    def close(self) -> None:
        """Watch no longer. What a later job of this process starts is none of its business."""
        self._thread.stop(_CLOSE_SECONDS)  # it may be telling something to a terminal that stands still

    def announce(self, num_nodes_waiting: int) -> None:
        """Let the workers know how many nodes wait to join."""
        heartbeat.announce(self._descriptor, num_nodes_waiting)

    def begin_generation(self) -> None:
        """Forget the workers of the generation before: all of them are gone."""
        self.tell_of_the_lost()
        heartbeat.begin_generation(self._descriptor)

    def tell_of_the_lost(self) -> None:
        """Tell of workers that have died without a word, of SIGKILL, for want of memory or by an exit of their own."""
        with self._lock:
            for sign in heartbeat.read(self._descriptor):
                is_told = sign.phase == heartbeat.ENDED or self._lost.get(sign.pid) == sign.pid_started
                if sign.step >= 0 and not is_told and processes.started(sign.pid) != sign.pid_started:
                    self._lost[sign.pid] = sign.pid_started
                    reason = f"ended without a word while {sign.phase}: killed, or by an exit that is not ours"
                    facts = {**_whose(sign), "reason": reason, "step": sign.step, "pid": sign.pid}
                    self._tell({"level": "warning", "event": "worker.lost", **facts})

    @property
    def has_stopped(self) -> bool:
        """Whether the workers have stopped as they were asked to, with all that was finished saved."""
        return heartbeat.num_stopped(self._descriptor) > 0

    @property
    def is_stopped_by_others(self) -> bool:
        """Whether they have, and were not asked by their agent alone, which would start them again."""
        return heartbeat.num_asked(self._descriptor) > 0

    @property
    def has_trained(self) -> bool:
        """Whether a worker has come as far as its first step."""
        return any(sign.step >= 0 for sign in heartbeat.read(self._descriptor))

    @property
    def is_refused(self) -> bool:
        """Whether a worker has said that starting it again is of no use."""
        return heartbeat.num_refusals(self._descriptor) > 0

    def _look(self) -> None:
        try:
            signs = heartbeat.read(self._descriptor)
            for sign in signs:
                if processes.started(sign.pid) == sign.pid_started:
                    self._look_at(sign)
            self.tell_of_the_lost()
            self._look_at_the_unborn({sign.pid for sign in signs})
        except Exception:  # whatever it was, the workers must not stay without a watch
            logging.getLogger(__name__).exception("warden.failed")

    def _look_at(self, sign: HeartbeatRecord) -> None:
        beats = self._beats.setdefault(sign.pid, StallTimer()).seconds((sign.pid_started, sign.num_beats))
        done = self._done.setdefault(sign.pid, StallTimer()).seconds((sign.pid_started, sign.num_done, sign.phase))
        limit = self._hang_timeout if sign.step >= 0 else self._patience_at_birth
        if beats > limit:
            self._end(sign, f"no sign of life for {beats:.0f} s")
        elif sign.phase == heartbeat.COMPUTING and done > limit + _OWN_SECONDS:
            self._end(sign, f"no progress for {done:.0f} s")

    def _look_at_the_unborn(self, known: set[int]) -> None:
        """End a worker that was stopped before it could give its first sign; nobody else would ever miss it."""
        for pid in processes.children():
            if pid in known or processes.condition(pid) != "stopped":
                self._unborn.pop(pid, None)
            elif self._unborn.setdefault(pid, StallTimer()).seconds(pid) > self._patience_at_birth:
                self._unborn.pop(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                reason = f"stopped for {self._patience_at_birth:.0f} s before its first sign of life; killed"
                nobody = dict.fromkeys(("run_id", "generation", "rank", "world_size"))
                self._tell({"level": "error", "event": "worker.hung", **nobody, "reason": reason, "pid": pid})

    def _end(self, sign: HeartbeatRecord, reason: str) -> None:
        condition = processes.condition(sign.pid)
        self._lost[sign.pid] = sign.pid_started  # before it is killed: it does not die without a word
        try:
            stack = _stack_of(sign)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(sign.pid, signal.SIGKILL)
        self._beats.pop(sign.pid)
        self._done.pop(sign.pid)
        self._tell(
            {
                "level": "error",
                "event": "worker.hung",
                **_whose(sign),
                "reason": f"{reason} while {sign.phase}; killed",
                "step": sign.step,
                "pid": sign.pid,
                "condition": condition,
                "stack": stack,
            },
        )

    def _tell(self, event: dict[str, Any]) -> None:
        from elastic_mnist.telemetry import events  # noqa: PLC0415 - most agents never have anything to tell

        events.append(self._event_log, event)


def _whose(sign: HeartbeatRecord) -> dict[str, Any]:
    """Return the keys by which an event says whose it is."""
    return {
        "run_id": sign.run_id or None,
        "generation": sign.generation,
        "rank": sign.rank,
        "world_size": sign.world_size,
    }


def _stack_of(sign: HeartbeatRecord) -> str | None:
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

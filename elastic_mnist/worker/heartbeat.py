"""The heartbeats that a worker writes; see `ipc.heartbeat` for their format."""

import contextlib
import faulthandler
import mmap
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Final

from elastic_mnist.errors import EXIT_FAILURE
from elastic_mnist.ipc import processes
from elastic_mnist.ipc.heartbeat import (
    COMPUTING,
    ENDED,
    EXIT_BARRIER,
    NUM_SLOTS,
    NUM_WAITING_BEGIN,
    NUMBER,
    SETTING_UP,
    SETTING_UP_SECONDS,
    SLOT,
    SLOT_SIZE,
    TABLE_SIZE,
    WAITING,
    HeartbeatRecord,
)
from elastic_mnist.ipc.timers import PeriodicThread, StallTimer

_BEAT_SECONDS: Final = 0.2

_NOT_COMPUTING_SECONDS: Final = 1800.0
"""A phase other than computing may take this long: a data set is fetched, a network's file system comes back."""


class HeartbeatWriter:
    """Writes this process's heartbeats, and ends the process where it hangs.

    Before `start`, nothing of it has an effect.

    Attributes:
        step: number of steps finished; -1 before the first position is known.
        rank, world_size, generation, run_id: identify the worker, once they are known.
        checks: called with each heartbeat; none of them may wait for anything.
        log_hang: is given reason and stacks before a process that hangs is ended.
    """

    def __init__(self) -> None:
        self.step = -1
        self.rank = -1
        self.world_size = 0
        self.generation = -1
        self.run_id = ""
        self.checks: list[Callable[[], None]] = []
        self.log_hang: Callable[[str, str], None] = lambda _reason, _stack: None
        self._hang_timeout = float("inf")
        self._trainer = 0
        self._pid = self._pid_started = 0
        self._slot: memoryview | None = None
        self._table: memoryview | None = None
        self._stack_descriptor = -1
        self._phase = SETTING_UP
        self._num_done = 0
        self._num_beats = 0
        self._stall_timer = StallTimer()
        self._stall: tuple[int, str, float] = (0, SETTING_UP, 0.0)  # progress and phase, and for how long they are so

    def start(self, path: str | None, *, local_rank: int, hang_timeout: float) -> None:
        """Begin to write heartbeats.

        Args:
            path: of the agent's table; None for a process without an agent.
            local_rank: the slot there.
            hang_timeout: seconds without progress after which this process ends itself.
        """
        self._hang_timeout = hang_timeout
        self._pid, self._pid_started = os.getpid(), processes.started(os.getpid()) or 0
        with contextlib.suppress(OSError, ValueError):
            if path is not None and local_rank < NUM_SLOTS:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                self._table = memoryview(mmap.mmap(descriptor, TABLE_SIZE))
                self._slot = self._table[local_rank * SLOT_SIZE :]
                os.close(descriptor)
                self._stack_descriptor = os.memfd_create("stack")
                faulthandler.register(signal.SIGUSR2, file=self._stack_descriptor, all_threads=True)
        self._trainer = threading.get_ident()
        PeriodicThread("heartbeat", _BEAT_SECONDS, self._beat).start()

    @property
    def num_nodes_waiting(self) -> int:
        """How many nodes wait to join, as the agent last saw them."""
        if self._table is None:
            return 0
        (number,) = NUMBER.unpack_from(self._table, NUM_WAITING_BEGIN)
        return int(number)

    def finished(self, step: int) -> None:
        """Write at once that `step` steps are finished: the process may be killed at the next instruction."""
        self.step = step
        self._write()

    def end(self) -> None:
        """Write that this process exits by itself, and has logged why."""
        self._phase = ENDED
        self._write()

    def progress(self) -> None:
        """Count a unit of work. Any thread may call this; a count lost between two of them does no harm."""
        self._num_done += 1

    @contextlib.contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Set the phase that the heartbeats name, for the length of a context."""
        before, self._phase = self._phase, phase
        self._num_done += 1
        try:
            yield
        finally:
            self._num_done += 1
            self._phase = before

    def patience(self, seconds: float) -> float:
        """Return how long to wait for a peer's heartbeat: `seconds`, and longer while this process is being set up.

        On a busy machine the imports alone, some of which hold the interpreter's lock, take many seconds.
        """
        return seconds if self.step >= 0 else max(seconds, SETTING_UP_SECONDS)

    def waiting_seconds(self) -> float:
        """Return for how long this process has waited for its peers; 0 where it does not."""
        done, phase, seconds = self._stall
        return seconds if phase in (WAITING, EXIT_BARRIER) and (done, phase) == (self._num_done, self._phase) else 0.0

    def _beat(self) -> None:
        self._num_beats += 1
        self._write()
        done, phase = self._num_done, self._phase
        seconds = self._stall_timer.seconds((done, phase))
        self._stall = (done, phase, seconds)
        if phase not in (WAITING, EXIT_BARRIER):  # a peer may take as long as it lives
            limit = self._hang_timeout if phase == COMPUTING else max(self._hang_timeout, _NOT_COMPUTING_SECONDS)
            if seconds > limit:
                self._exit_hung(phase, seconds)
        for check in self.checks:
            check()

    def _write(self) -> None:
        if self._slot is not None:
            self._slot[: SLOT.size] = self._record().to_bytes()

    def _record(self) -> HeartbeatRecord:
        return HeartbeatRecord(
            pid=self._pid,
            pid_started=self._pid_started,
            num_beats=self._num_beats,
            num_done=self._num_done,
            step=self.step,
            rank=self.rank,
            world_size=self.world_size,
            generation=self.generation,
            stack_descriptor=self._stack_descriptor,
            phase=self._phase,
            run_id=self.run_id,
        )

    def _exit_hung(self, phase: str, seconds: float) -> None:
        """Log the stacks of the thread that trains and of its pool, and end the process."""
        try:
            frames = sys._current_frames()  # noqa: SLF001 - the documented way to other threads' stacks
            stacks = [
                f"{thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
                for thread in threading.enumerate()
                if thread.ident in frames and (thread.ident == self._trainer or thread.name.startswith("micro-batch"))
            ]
            reason = f"no progress for {seconds:.0f} s while {phase}"
            hint = "; raise --hang_timeout if a micro-batch takes that long" if phase == COMPUTING else ""
            self.log_hang(reason + hint, "\n".join(stacks))
        finally:
            self.end()
            os._exit(EXIT_FAILURE)


heartbeat_writer: Final = HeartbeatWriter()
"""One a process: its table and its fatal signals are the process's, as is what the collectives report to it."""

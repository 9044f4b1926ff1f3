"""A worker's signs of life, and what is read from them: is it alive, does it move, where does it stand?

The thread that trains counts what it has done: a micro-batch, a chunk of an evaluation, a collective. A second thread
beats a few times a second, and writes the count where the node's agent can see it (see `warden`). So three ways to hang
can be told apart, and from what is merely slow:

- stopped, or wedged with the interpreter's lock held: the beats cease, and the agent ends the process;
- spinning: the beats go on and the count stands still while it computes; the process tells where, and ends itself;
- waiting for a peer: the count stands still in a collective. That is the peer's fault, if it is one: see `world`.

A long evaluation, a slow step or a slow store is none of these.
"""

import contextlib
import faulthandler
import fcntl
import mmap
import os
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from elastic_mnist.errors import EXIT_FAILURE
from elastic_mnist.ipc import processes

NUM_SLOTS: Final = 1024  # local ranks

_BEAT_SECONDS: Final = 0.2
_SLOT: Final = struct.Struct("<QQQQqqqqq32s16s")
_SLOT_SIZE: Final = 256
_NUMBER: Final = struct.Struct("<q")
_NUM_WAITING_BEGIN: Final = NUM_SLOTS * _SLOT_SIZE  # behind the signs: nodes that wait to join, as the agent says
_NUM_REFUSALS_BEGIN: Final = _NUM_WAITING_BEGIN + _NUMBER.size  # workers that said that it is of no use
_NUM_STOPPED_BEGIN: Final = _NUM_REFUSALS_BEGIN + _NUMBER.size  # those of this generation that have stopped in order
_NUM_ASKED_BEGIN: Final = _NUM_STOPPED_BEGIN + _NUMBER.size  # of these, those that somebody else than the agent asked
TABLE_SIZE: Final = _NUM_WAITING_BEGIN + _SLOT_SIZE
_GAP_SECONDS: Final = 2.0
"""Whoever was not run for so long, because the machine or the process was stopped, knows nothing of the others."""

SETTING_UP: Final = "setting up"
COMPUTING: Final = "computing"
WAITING: Final = "waiting for peers"
SAVING: Final = "saving"
PARTING: Final = "waiting for rank 0 to save"
FINISHING: Final = "finishing"
ENDED: Final = "ended"
"""In order, or with a word of why: nobody else has to tell of it."""

SETTING_UP_SECONDS: Final = 60.0

_WHILE_STORES_MAY_BE_SLOW: Final = 1800.0
"""Seconds that whatever is no computing may take: a data set to fetch, a network's file system that comes back."""


@dataclass(frozen=True, kw_only=True)
class Sign:
    """What a worker has written of itself.

    Attributes:
        pid, pid_started: which process.
        num_beats: of its second thread.
        num_done: what the thread that trains has counted.
        step: number of steps finished; -1 before the first is known.
        phase: what it is doing, for people.
        stack_descriptor: of the file to which it writes its stack at SIGUSR2; -1 for none.
    """

    pid: int
    pid_started: int
    num_beats: int
    num_done: int
    step: int
    rank: int
    world_size: int
    generation: int
    stack_descriptor: int
    phase: str
    run_id: str

    def to_bytes(self) -> bytes:
        """Return the content of a slot."""
        *numbers, phase, run_id = vars(self).values()
        return _SLOT.pack(*numbers, phase.encode(), run_id.encode())

    @classmethod
    def from_bytes(cls, data: bytes) -> "Sign":
        """Read a slot."""
        *numbers, phase, run_id = _SLOT.unpack(data)
        texts = (text.rstrip(b"\0").decode(errors="replace") for text in (phase, run_id))
        return cls(**dict(zip(cls.__dataclass_fields__, (*numbers, *texts), strict=True)))


def read(descriptor: int) -> list[Sign]:
    """Return the signs of all workers that have ever written one to an agent's table."""
    data = os.pread(descriptor, TABLE_SIZE, 0)
    begins = (begin for begin in range(0, _NUM_WAITING_BEGIN, _SLOT_SIZE) if any(data[begin : begin + 8]))  # its pid
    return [Sign.from_bytes(data[begin : begin + _SLOT.size]) for begin in begins]


def announce(descriptor: int, num_nodes_waiting: int) -> None:
    """Let an agent's workers know how many nodes wait to join: when it stops them, they can tell why."""
    os.pwrite(descriptor, _NUMBER.pack(num_nodes_waiting), _NUM_WAITING_BEGIN)


def refuse(path: str | None) -> bool:
    """Tell the agent that starting its workers again is of no use; return whether this worker is the first to say so.

    Args:
        path: leads to the agent's table; None for none, where everybody is the first.
    """
    return _count(path, _NUM_REFUSALS_BEGIN) == 0


def stopped(path: str | None, *, by_others: bool) -> None:
    """Tell the agent that this worker has stopped as it was asked to, with all that was finished saved.

    Args:
        path: leads to the agent's table; None for none.
        by_others: whether the agent was not the only one to ask.
    """
    _count(path, _NUM_STOPPED_BEGIN)
    if by_others:
        _count(path, _NUM_ASKED_BEGIN)


def _count(path: str | None, begin: int) -> int:
    """Count a worker in an agent's table; return how many there were before."""
    if path is None:
        return 0
    try:
        with open(path, "r+b", buffering=0) as table:  # noqa: PTH123 - a Path would read the link
            fcntl.lockf(table, fcntl.LOCK_EX)
            num_before = _number(table.fileno(), begin)
            os.pwrite(table.fileno(), _NUMBER.pack(num_before + 1), begin)
    except OSError:  # the agent is gone, and nobody starts anything again
        return 0
    return num_before


def num_refusals(descriptor: int) -> int:
    """Return how many workers have told their agent that starting them again is of no use."""
    return _number(descriptor, _NUM_REFUSALS_BEGIN)


def num_stopped(descriptor: int) -> int:
    """Return how many workers of the generation have stopped in order."""
    return _number(descriptor, _NUM_STOPPED_BEGIN)


def num_asked(descriptor: int) -> int:
    """Return how many of those were asked by somebody else than the agent."""
    return _number(descriptor, _NUM_ASKED_BEGIN)


def begin_generation(descriptor: int) -> None:
    """Forget the workers of the generation before."""
    os.pwrite(descriptor, bytes(_NUM_WAITING_BEGIN), 0)
    os.pwrite(descriptor, bytes(2 * _NUMBER.size), _NUM_STOPPED_BEGIN)


def _number(descriptor: int, begin: int) -> int:
    (number,) = _NUMBER.unpack(os.pread(descriptor, _NUMBER.size, begin))
    return int(number)


class Stillness:
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


class Heart:
    """The signs of life of this process.

    Its attributes are set by whoever knows them. Before `start` all of it has no effect.
    """

    def __init__(self) -> None:
        self.step = -1
        self.rank = -1
        self.world_size = 0
        self.generation = -1
        self.run_id = ""
        self.checks: list[Callable[[], None]] = []
        """Called with each beat; none of them may wait for anything."""
        self.tell: Callable[[str, str], None] = lambda _reason, _stack: None
        self._hang_timeout = float("inf")
        self._trainer = 0
        self._pid = self._pid_started = 0
        self._slot: memoryview | None = None
        self._table: memoryview | None = None
        self._stack_descriptor = -1
        self._phase = SETTING_UP
        self._num_done = 0
        self._num_beats = 0
        self._stillness = Stillness()
        self._still: tuple[int, str, float] = (0, SETTING_UP, 0.0)

    def start(self, path: str | None, *, local_rank: int, hang_timeout: float) -> None:
        """Begin to beat.

        Args:
            path: leads to the agent's table; None for none.
            local_rank: the slot there.
            hang_timeout: seconds without progress after which this process ends itself.
        """
        self._hang_timeout = hang_timeout
        self._pid, self._pid_started = os.getpid(), processes.started(os.getpid()) or 0
        with contextlib.suppress(OSError, ValueError):
            if path is not None and local_rank < NUM_SLOTS:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                self._table = memoryview(mmap.mmap(descriptor, TABLE_SIZE))
                self._slot = self._table[local_rank * _SLOT_SIZE :]
                os.close(descriptor)
                self._stack_descriptor = os.memfd_create("stack")
                faulthandler.register(signal.SIGUSR2, file=self._stack_descriptor, all_threads=True)
        self._trainer = threading.get_ident()
        threading.Thread(target=self._beat, name="heart", daemon=True).start()

    @property
    def num_nodes_waiting(self) -> int:
        """How many nodes wait to join, as far as the agent has said."""
        if self._table is None:
            return 0
        (number,) = _NUMBER.unpack_from(self._table, _NUM_WAITING_BEGIN)
        return int(number)

    def finished(self, step: int) -> None:
        """Note that so many steps are finished, at once: the next instruction may be the last."""
        self.step = step
        self._write()

    def end(self) -> None:
        """Say that this process ends, in order or with a word of why."""
        self._phase = ENDED
        self._write()

    def progress(self) -> None:
        """Count something done. Called from any thread; a count that is lost between two of them does no harm."""
        self._num_done += 1

    @contextlib.contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Say what this process does meanwhile."""
        before, self._phase = self._phase, phase
        self._num_done += 1
        try:
            yield
        finally:
            self._num_done += 1
            self._phase = before

    def patience(self, seconds: float) -> float:
        """Return how long to wait for a sign of life: `seconds`, and longer while this process is being set up.

        On a busy machine the imports alone, some of which hold the interpreter's lock, take many seconds.
        """
        return seconds if self.step >= 0 else max(seconds, SETTING_UP_SECONDS)

    def waiting_seconds(self) -> float:
        """Return for how long this process has waited for its peers; 0 where it does not."""
        done, phase, seconds = self._still
        return seconds if phase in (WAITING, PARTING) and (done, phase) == (self._num_done, self._phase) else 0.0

    def _beat(self) -> None:
        while True:
            self._num_beats += 1
            self._write()
            done, phase = self._num_done, self._phase
            self._still = (done, phase, self._stillness.seconds((done, phase)))
            if phase not in (WAITING, PARTING):  # a peer may take as long as it lives
                limit = self._hang_timeout if phase == COMPUTING else max(self._hang_timeout, _WHILE_STORES_MAY_BE_SLOW)
                if self._still[2] > limit:
                    self._end(phase, self._still[2])
            for check in self.checks:
                check()
            time.sleep(_BEAT_SECONDS)

    def _write(self) -> None:
        if self._slot is not None:
            self._slot[: _SLOT.size] = self._sign().to_bytes()

    def _sign(self) -> Sign:
        return Sign(
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

    def _end(self, phase: str, seconds: float) -> None:
        """Tell where the thread that trains and its lanes stand, and end the process."""
        try:
            frames = sys._current_frames()  # noqa: SLF001 - the documented way to other threads' stacks
            stacks = [
                f"{thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
                for thread in threading.enumerate()
                if thread.ident in frames and (thread.ident == self._trainer or thread.name.startswith("lane"))
            ]
            reason = f"no progress for {seconds:.0f} s while {phase}"
            hint = "; raise --hang_timeout if a micro-batch takes that long" if phase == COMPUTING else ""
            self.tell(reason + hint, "\n".join(stacks))
        finally:
            self.end()
            os._exit(EXIT_FAILURE)


heart: Final = Heart()
"""One a process."""

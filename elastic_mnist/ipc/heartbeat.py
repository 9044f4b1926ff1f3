"""A worker's signs of life, and what is read from them: is it alive, does it move, where does it stand?

The thread that trains counts what it has done: a micro-batch, a chunk of an evaluation, a collective. A second thread
beats a few times a second, and writes the count where the node's agent can see it (see `warden`). So three ways to hang
can be told apart, and from what is merely slow:

- stopped, or wedged with the interpreter's lock held: the beats cease, and the agent ends the process;
- spinning: the beats go on and the count stands still while it computes; the process tells where, and ends itself;
- waiting for a peer: the count stands still in a collective. That is the peer's fault, if it is one: see `world`.

A long evaluation, a slow step or a slow store is none of these.
"""

import fcntl
import os
import struct
from dataclasses import dataclass
from typing import Final

NUM_SLOTS: Final = 1024  # local ranks

SLOT: Final = struct.Struct("<QQQQqqqqq32s16s")
SLOT_SIZE: Final = 256
NUMBER: Final = struct.Struct("<q")
NUM_WAITING_BEGIN: Final = NUM_SLOTS * SLOT_SIZE  # behind the signs: nodes that wait to join, as the agent says
_NUM_REFUSALS_BEGIN: Final = NUM_WAITING_BEGIN + NUMBER.size  # workers that said that it is of no use
_NUM_STOPPED_BEGIN: Final = _NUM_REFUSALS_BEGIN + NUMBER.size  # those of this generation that have stopped in order
_NUM_ASKED_BEGIN: Final = _NUM_STOPPED_BEGIN + NUMBER.size  # of these, those that somebody else than the agent asked
TABLE_SIZE: Final = NUM_WAITING_BEGIN + SLOT_SIZE

SETTING_UP: Final = "setting up"
COMPUTING: Final = "computing"
WAITING: Final = "waiting for peers"
SAVING: Final = "saving"
EXIT_BARRIER: Final = "waiting for rank 0 to save"
FINISHING: Final = "finishing"
ENDED: Final = "ended"
"""In order, or with a word of why: nobody else has to tell of it."""

SETTING_UP_SECONDS: Final = 60.0


@dataclass(frozen=True, kw_only=True)
class HeartbeatRecord:
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
        return SLOT.pack(*numbers, phase.encode(), run_id.encode())

    @classmethod
    def from_bytes(cls, data: bytes) -> "HeartbeatRecord":
        """Read a slot."""
        *numbers, phase, run_id = SLOT.unpack(data)
        texts = (text.rstrip(b"\0").decode(errors="replace") for text in (phase, run_id))
        return cls(**dict(zip(cls.__dataclass_fields__, (*numbers, *texts), strict=True)))


def read(descriptor: int) -> list[HeartbeatRecord]:
    """Return the signs of all workers that have ever written one to an agent's table."""
    data = os.pread(descriptor, TABLE_SIZE, 0)
    begins = (begin for begin in range(0, NUM_WAITING_BEGIN, SLOT_SIZE) if any(data[begin : begin + 8]))  # its pid
    return [HeartbeatRecord.from_bytes(data[begin : begin + SLOT.size]) for begin in begins]


def announce(descriptor: int, num_nodes_waiting: int) -> None:
    """Let an agent's workers know how many nodes wait to join: when it stops them, they can tell why."""
    os.pwrite(descriptor, NUMBER.pack(num_nodes_waiting), NUM_WAITING_BEGIN)


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
            os.pwrite(table.fileno(), NUMBER.pack(num_before + 1), begin)
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
    os.pwrite(descriptor, bytes(NUM_WAITING_BEGIN), 0)
    os.pwrite(descriptor, bytes(2 * NUMBER.size), _NUM_STOPPED_BEGIN)


def _number(descriptor: int, begin: int) -> int:
    (number,) = NUMBER.unpack(os.pread(descriptor, NUMBER.size, begin))
    return int(number)

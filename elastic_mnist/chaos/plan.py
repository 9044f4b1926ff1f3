"""Which fault comes at which coordinate: pure functions of a seed and the shape of a job.

Fault model, which the job must survive. A coordinate is a step, and the ranks that the fault befalls when they are
about to begin it: so many steps are finished then. Steps ascend; each fault comes once, in a generation of workers that
no fault has befallen before it.

`nan` is another kind of thing: not an accident, but a batch that is poisoned each time it is computed, also in the
undisturbed job.
"""

import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from elastic_mnist.errors import EXIT_STOPPED, UsageError
from elastic_mnist.snapshots.plain import from_plain


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of fault, and what is promised of it.

    Attributes:
        text: what happens, for people.
        detect_seconds: at most, until the log tells of it.
        recover_seconds: at most, until the job is again where it was; beside the time to detect it.
        waits_for_hang: whether it is noticed by `--hang_timeout` alone, which is added to `detect_seconds`.
        agent_status: with which it ends a node's agent, where it does; None where the agent must go on.
        is_end_of_agent: whether it ends a node's agent, to be started again; the node's memory tier ends with it.
        is_stop: whether it asks the job to stop in order.
        is_of_data: whether it befalls a batch, each time, and no process.
    """

    text: str
    detect_seconds: float = 15.0
    recover_seconds: float = 45.0
    waits_for_hang: bool = False
    agent_status: int | None = None
    is_end_of_agent: bool = False
    is_stop: bool = False
    is_of_data: bool = False


KINDS: Final[dict[str, Kind]] = {
    "kill": Kind(text="SIGKILL of a worker"),
    "killall": Kind(text="SIGKILL of all workers of a node at once"),
    "stop": Kind(text="SIGSTOP of a worker", waits_for_hang=True),
    "spin": Kind(text="a worker computes for ever", waits_for_hang=True),
    # A worker that was asked to stop by another than its agent has the agent stop, too.
    "term": Kind(text="SIGTERM to a worker", agent_status=EXIT_STOPPED, is_stop=True),
    "termall": Kind(text="SIGTERM to rank 0, and 200 ms later to rank 1", agent_status=EXIT_STOPPED, is_stop=True),
    "raise": Kind(text="an exception in a worker"),
    "exit": Kind(text="a worker ends by itself, with status 0 or 1"),
    "nan": Kind(text="a batch whose loss is not a number", is_of_data=True),
    "damage": Kind(
        text="SIGKILL of the agent, and a flipped byte in the newest snapshot",
        agent_status=-signal.SIGKILL,
        is_end_of_agent=True,
    ),
    "agent": Kind(text="SIGKILL of the agent", agent_status=-signal.SIGKILL, is_end_of_agent=True),
    "agentterm": Kind(text="SIGTERM to the agent", agent_status=EXIT_STOPPED, is_end_of_agent=True, is_stop=True),
    "grow": Kind(text="a node joins", detect_seconds=45.0),
    "shrink": Kind(
        text="SIGKILL of the agent of the node that joined last", detect_seconds=30.0, agent_status=-signal.SIGKILL
    ),
}

_MAX_POISONED: Final = 10
"""The trainer stops at more: `trainer.MAX_SKIPPED_STEPS`, named again because that would import torch."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of a plan.

    Attributes:
        kind: a key of `KINDS`.
        step: number of steps finished before it.
        ranks: which global ranks it befalls; of `nan`, the rank that has the step's first micro-batch.
        argument: the exit status of `exit`; of `damage`, where in the file the byte lies, in thousandths of its size.
    """

    kind: str
    step: int
    ranks: tuple[int, ...]
    argument: int = 0

    @classmethod
    def from_plain(cls, content: dict[str, Any]) -> "Fault":
        """Build a fault from what `asdict` made of one."""
        return from_plain(cls, content)

    @property
    def coordinate(self) -> str:
        """Where it comes, for people."""
        ranks = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {','.join(map(str, self.ranks))}"
        return f"step {self.step}" if KINDS[self.kind].is_of_data else f"step {self.step}, {ranks}"

    def to_plain(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a plan must know of the job.

    Attributes:
        num_steps: from the first to the last.
        first_damage_step: from which on a snapshot is surely there to be damaged.
        num_processes: workers of a node.
        max_nodes: nodes at most; the job starts with one.
    """

    num_steps: int
    first_damage_step: int
    num_processes: int
    max_nodes: int


class Draw:
    """Choices from a seed.

    Of `random`, only the stream of `random()` is promised to stay what it is in every version of Python.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - repeatable, not secret

    def below(self, limit: int) -> int:
        """Return a number from 0 to `limit` - 1."""
        return int(self._random.random() * limit)

    def choose(self, items: Sequence[str]) -> str:
        """Return one of some items."""
        return items[self.below(len(items))]

    def distinct(self, count: int, numbers: range) -> list[int]:
        """Return different numbers of a range, the smallest first."""
        pool = list(numbers)
        return sorted(pool.pop(self.below(len(pool))) for _ in range(count))


def generate(seed: int, kinds: Sequence[str], num_faults: int, shape: Shape) -> tuple[Fault, ...]:
    """Return the plan of a seed.

    Each kind comes once before any comes twice, where the state of the job at that step allows. The last tenth of the
    job is left in peace, for the progress that is demanded when the faults are over.

    Raises:
        UsageError: so many faults, or these kinds, do not fit the job.
    """
    draw = Draw(seed)
    first = min(shape.first_damage_step if kind == "damage" else 0 for kind in kinds)
    steps = range(first, max(1, shape.num_steps * 9 // 10))
    if num_faults > len(steps):
        raise UsageError(
            f"--faults {num_faults}: the job has {len(steps)} steps for them; train longer, or take fewer faults"
        )
    return tuple(_faults(draw, kinds, draw.distinct(num_faults, steps), shape))


def _faults(draw: Draw, kinds: Sequence[str], steps: Sequence[int], shape: Shape) -> Iterator[Fault]:
    num_nodes, num_poisoned, bag = 1, 0, list(kinds)
    for step in steps:
        possible = [kind for kind in kinds if _is_possible(kind, step, num_nodes, shape)]
        if num_poisoned == _MAX_POISONED:
            possible = [kind for kind in possible if kind != "nan"]
        if not possible:
            raise UsageError(
                f"--kinds {','.join(kinds)}: none of them is possible at step {step} with {num_nodes} of at most "
                f"{shape.max_nodes} nodes; add kill, or what is its counterpart to grow or shrink"
            )
        bag = bag or list(kinds)
        kind = draw.choose([kind for kind in bag if kind in possible] or possible)
        if kind in bag:
            bag.remove(kind)
        yield _fault(draw, kind, step, num_nodes, shape)
        num_nodes += (kind == "grow") - (kind == "shrink")
        num_poisoned += kind == "nan"


def _is_possible(kind: str, step: int, num_nodes: int, shape: Shape) -> bool:
    """Whether a fault can come in a job that is at a step, with so many nodes.

    The first node's agent holds the rendezvous, and its end is the end of all nodes: it comes while there is one.
    A worker that is asked to stop has its agent end, so among several nodes it is none of the first one's.
    """
    if kind == "grow":
        return num_nodes < shape.max_nodes
    if kind == "shrink":
        return num_nodes > 1
    if kind == "termall":
        return num_nodes == 1 and shape.num_processes > 1
    if KINDS[kind].is_end_of_agent:
        return num_nodes == 1 and (kind != "damage" or step >= shape.first_damage_step)
    return True


def _fault(draw: Draw, kind: str, step: int, num_nodes: int, shape: Shape) -> Fault:
    size, num_ranks = shape.num_processes, shape.num_processes * num_nodes
    argument = 0
    if kind == "killall":
        begin = draw.below(num_nodes) * size
        ranks = tuple(range(begin, begin + size))
    elif kind == "termall":
        ranks = (0, 1)
    elif kind == "shrink":
        ranks = (num_ranks - size,)
    elif kind in {"grow", "nan"}:
        ranks = (0,)
    elif kind == "term" and num_nodes > 1:
        ranks = (size + draw.below(num_ranks - size),)
    else:
        ranks = (draw.below(num_ranks),)
    if kind == "exit":
        argument = draw.below(2)
    elif kind == "damage":
        argument = draw.below(1000)
    return Fault(kind=kind, step=step, ranks=ranks, argument=argument)

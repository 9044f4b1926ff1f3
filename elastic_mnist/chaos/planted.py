"""The faults inside a worker: at their exact coordinates, and with a mark as the proof that they fired.

`plant` is called in a worker when its trainer has been imported (see `plant/sitecustomize.py`), and replaces the
function that the loop calls at the beginning of each step. A process does at most one fault: the first of the plan
that has not fired yet, at the step that it names or, where the rank was not there at that step, as soon as it is.
"""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from elastic_mnist.chaos.plan import KINDS, Fault
from elastic_mnist.telemetry import events

PLAN_VARIABLE: Final = "ELASTIC_MNIST_CHAOS_PLAN"
"""Path of the plan; the marks are made beside it. `plant/sitecustomize.py` knows the name, too."""

_HOLD_SECONDS: Final = 5.0
"""A step waits so long for a node that is about to join."""

_JOIN_SECONDS: Final = 1.0
"""So much longer, once that node has found the others: the launcher looks for newcomers ten times a second."""

_TOGETHER_SECONDS: Final = 5.0
_APART_SECONDS: Final = 0.2
_BURIAL_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.005


class Marks:
    """The proofs that faults fired: a file for each, and rank.

    Args:
        plan_path: of the plan.
    """

    def __init__(self, plan_path: Path) -> None:
        self.directory = plan_path.parent / "marks"

    def path(self, index: int, rank: int) -> Path:
        """Return where the mark of a fault and a rank is made."""
        return self.directory / f"fault-{index:03d}-rank-{rank:05d}.json"

    def release_path(self, index: int) -> Path:
        """Return the file that ends the wait of a fault."""
        return self.directory / f"fault-{index:03d}-go-on"

    def make(self, index: int, rank: int, **facts: object) -> bool:
        """Make a mark, whole or not at all; return whether there was none yet."""
        self.directory.mkdir(exist_ok=True)
        path, content = self.path(index, rank), {"fault": index, "rank": rank, "time": time.time(), **facts}
        draft = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        draft.write_text(json.dumps(content) + "\n")
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True

    def are_made(self, index: int, fault: Fault) -> bool:
        """Whether a fault has befallen all its ranks."""
        return all(self.path(index, rank).exists() for rank in fault.ranks)


def read_plan(path: Path) -> tuple[Fault, ...]:
    """Read what `write_plan` wrote."""
    return tuple(map(Fault.from_plain, json.loads(path.read_text())))


def write_plan(path: Path, faults: Sequence[Fault]) -> None:
    """Write a plan for the workers."""
    path.write_text(json.dumps([fault.to_plain() for fault in faults], indent=1) + "\n")


def plant(trainer: Any) -> None:  # noqa: ANN401 - a module whose functions are replaced
    """Plant the plan's faults in this process."""
    path = Path(os.environ[PLAN_VARIABLE])
    faults, marks = read_plan(path), Marks(path)
    _poison(faults, marks)
    pending = (
        (index, fault)
        for index, fault in enumerate(faults)
        if not KINDS[fault.kind].is_of_data and not marks.are_made(index, fault)
    )
    due = next(pending, None)
    if due is not None:
        trainer.Trainer.begin_step = _before(trainer.Trainer.begin_step, *due, marks)


def _before(begin: Callable[[Any], None], index: int, fault: Fault, marks: Marks) -> Callable[[Any], None]:
    """Return what begins a step, with a fault before it."""

    def begin_step(training: Any) -> None:  # noqa: ANN401 - the trainer's own type, not imported here
        if (
            training.position.step >= fault.step
            and training.rank in fault.ranks
            and marks.make(index, training.rank, step=training.position.step, **_generation())
        ):
            _fire(index, fault, training, marks)
        begin(training)

    return begin_step


def _generation() -> dict[str, Any]:
    keys = events._identity.keys  # noqa: SLF001 - the one place that knows
    return {"generation": keys["generation"], "world_size": keys["world_size"]}


def _poison(faults: Sequence[Fault], marks: Marks) -> None:
    """Let the first micro-batch of each poisoned step have a loss that is not a number, whenever it is computed."""
    poisoned = {fault.step: index for index, fault in enumerate(faults) if KINDS[fault.kind].is_of_data}
    if not poisoned:
        return
    from elastic_mnist.training.gradients import Objective  # noqa: PLC0415 - only some plans need it

    compute = Objective.loss

    def loss(self: Objective, micro_batch: Any, *, epoch: int, step_index: int) -> Any:  # noqa: ANN401 - as it was
        value = compute(self, micro_batch, epoch=epoch, step_index=step_index)
        if micro_batch.index > 0 or step_index not in poisoned:
            return value
        index = poisoned[step_index]
        marks.make(index, faults[index].ranks[0], step=step_index, **_generation())
        return value * float("nan")

    Objective.loss = loss  # type: ignore[method-assign]


def _fire(index: int, fault: Fault, training: Any, marks: Marks) -> None:  # noqa: ANN401 - the same
    if len(fault.ranks) > 1:
        _wait(lambda: marks.are_made(index, fault), _TOGETHER_SECONDS)
    if fault.kind == "grow":
        # Both together are less than the time after which this would count as a hang.
        patience = min(1.0, training.settings.hang_timeout / (2 * _HOLD_SECONDS))
        _wait(marks.release_path(index).exists, patience * _HOLD_SECONDS)
        time.sleep(patience * _JOIN_SECONDS)
    else:
        _ACTIONS[fault.kind](fault, training.rank)


def _signal_me(number: signal.Signals, after_seconds: float = 0.0) -> None:
    if after_seconds > 0:
        threading.Timer(after_seconds, os.kill, (os.getpid(), number)).start()
    else:
        os.kill(os.getpid(), number)


def _kill_agent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(_BURIAL_SECONDS)  # the kernel ends this process with its parent


def _raise() -> None:
    raise RuntimeError("a fault planted by elastic-mnist chaos")


def _spin() -> None:
    while True:
        pass


_ACTIONS: Final[dict[str, Callable[[Fault, int], None]]] = {
    "kill": lambda _fault, _rank: _signal_me(signal.SIGKILL),
    "killall": lambda _fault, _rank: _signal_me(signal.SIGKILL),
    "stop": lambda _fault, _rank: _signal_me(signal.SIGSTOP),
    "spin": lambda _fault, _rank: _spin(),
    "term": lambda _fault, _rank: _signal_me(signal.SIGTERM),
    "termall": lambda _fault, rank: _signal_me(signal.SIGTERM, after_seconds=_APART_SECONDS * rank),
    "raise": lambda _fault, _rank: _raise(),
    "exit": lambda fault, _rank: os._exit(fault.argument),
    "damage": lambda _fault, _rank: _kill_agent(),
    "agent": lambda _fault, _rank: _kill_agent(),
    "agentterm": lambda _fault, _rank: os.kill(os.getppid(), signal.SIGTERM),
    "shrink": lambda _fault, _rank: _kill_agent(),
}
"""What a worker does, by the fault's kind; `grow` is the injector's."""


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if condition():
                return
        time.sleep(_POLL_SECONDS)

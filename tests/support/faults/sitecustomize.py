"""Faults at coordinates, inside a real worker: imported by Python itself where this directory is on PYTHONPATH.

`ELASTIC_MNIST_TEST_FAULT` is `KIND RANK STEP GENERATION FILE`: at the beginning of that step that rank of that
generation does what KIND says, once, and leaves FILE as the proof; with `ELASTIC_MNIST_TEST_FAULT_AGAIN`, it does so in
every generation. `ELASTIC_MNIST_TEST_POISON` is a step, or "all", whose loss is not finite; `ELASTIC_MNIST_TEST_CRAWL`
is how many seconds longer each micro-batch takes. The package knows nothing of this.
"""

import ctypes
import importlib.abc
import importlib.machinery
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_TARGET = "elastic_mnist.training.trainer"


def _fire(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "raise":
        raise RuntimeError("a planted fault")
    elif kind == "exit":
        os._exit(0)
    elif kind == "spin":
        while True:
            pass
    elif kind == "wedge":
        while True:  # the question for its stack is a signal, which ends a sleep
            ctypes.PyDLL(None).sleep(10**6)  # with the interpreter's lock held
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)


def _plant(module: Any) -> None:  # noqa: ANN401 - a module whose functions are replaced
    kind, rank, step, generation, file = os.environ["ELASTIC_MNIST_TEST_FAULT"].split(maxsplit=4)
    is_again = "ELASTIC_MNIST_TEST_FAULT_AGAIN" in os.environ
    original = module.Trainer.begin_step

    def begin_step(trainer: Any) -> None:  # noqa: ANN401 - the trainer's own type, not imported here
        from elastic_mnist.telemetry import events  # noqa: PLC0415

        here = (os.environ.get("RANK", "0"), str(trainer.position.step), str(events._identity.keys["generation"]))
        if here[:2] == (rank, step) and (here[2] == generation or is_again) and (is_again or not Path(file).exists()):
            Path(file).write_text(" ".join(here))
            _fire(kind)
        original(trainer)

    module.Trainer.begin_step = begin_step
    _spoil()


def _spoil() -> None:
    """Make losses not finite, or slow."""
    from elastic_mnist.training.gradients import Objective  # noqa: PLC0415

    poisoned, crawl = (
        os.environ.get("ELASTIC_MNIST_TEST_POISON"),
        float(os.environ.get("ELASTIC_MNIST_TEST_CRAWL", "0")),
    )
    original = Objective.loss

    def loss(self: Any, micro_batch: Any, *, epoch: int, step_index: int) -> Any:  # noqa: ANN401 - the package's types
        time.sleep(crawl)
        value = original(self, micro_batch, epoch=epoch, step_index=step_index)
        return value * float("nan") if poisoned in (str(step_index), "all") else value

    Objective.loss = loss  # type: ignore[method-assign]


class _Hook(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _TARGET:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        loader = spec.loader
        assert isinstance(loader, importlib.machinery.SourceFileLoader)
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _plant(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "ELASTIC_MNIST_TEST_FAULT" in os.environ:
    sys.meta_path.insert(0, _Hook())

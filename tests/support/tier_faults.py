"""Several faults at coordinates inside real workers; a `tiers.Plan` has Python itself import this at a worker's start.

`ELASTIC_MNIST_TIER_FAULTS` is a JSON list of the fields of `tiers.Fault`, each with the file that proves that it fired.
Faults strike at the beginning of a step or of an evaluation, before a copy into the memory tier, or in the middle of
a durable snapshot's data, of which then one half is written. The package knows nothing of this.
"""

import importlib.abc
import importlib.machinery
import io
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_HOLD_SECONDS = 60.0
_FAULTS: list[dict[str, Any]] = json.loads(os.environ.get("ELASTIC_MNIST_TIER_FAULTS", "[]"))
_lock = threading.Lock()
_requests: list[Any] = []


def _meet(place: str, step: int) -> None:
    """Let the faults of this coordinate fire."""
    from elastic_mnist.telemetry import events  # noqa: PLC0415 - the worker has imported it

    keys = events._identity.keys
    for fault in _FAULTS:
        if (
            fault["place"] == place
            and keys["rank"] in fault["ranks"]
            and fault["step"] in (step, None)
            and fault["generation"] in (keys["generation"], None)
            and not (fault["kind"] == "stop" and Path(fault["file"]).exists())  # once: whoever is continued goes on
        ):
            _note(fault, f"begins {keys['rank']} {step} {events.at_step()}")
            _fire(fault)
            _note(fault, f"ended {keys['rank']} {step} {events.at_step()}")


def _note(fault: dict[str, Any], line: str) -> None:
    with _lock, Path(fault["file"]).open("a") as file:
        file.write(line + "\n")


def _fire(fault: dict[str, Any]) -> None:
    kind = fault["kind"]
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "sleep":
        time.sleep(fault["seconds"])
    else:
        assert kind == "hold"
        deadline = time.monotonic() + _HOLD_SECONDS
        while not (Path(fault["file"] + ".go").exists() or _is_asked_to_stop()) and time.monotonic() < deadline:
            time.sleep(0.01)


def _is_asked_to_stop() -> bool:
    return any(requests.received for requests in _requests)


class _InHalves(io.FileIO):
    """A file whose one write meets the faults half-way."""

    def __init__(self, path: Path, step: int) -> None:
        super().__init__(path, "xb")
        self._step = step

    def write(self, data: bytes) -> int:  # type: ignore[override]
        half = len(data) // 2
        written = super().write(data[:half])
        _meet("write", self._step)
        return written + super().write(data[half:])


def _plant_trainer(module: Any) -> None:  # noqa: ANN401 - a module whose functions are replaced
    begin_step, finish_epoch = module.Trainer.begin_step, module.Trainer.finish_epoch

    def at_step(trainer: Any) -> None:  # noqa: ANN401 - the trainer's own type, not imported here
        _meet("step", trainer.position.step)
        begin_step(trainer)

    def at_evaluation(trainer: Any) -> None:  # noqa: ANN401
        _meet("evaluation", trainer.position.step)
        finish_epoch(trainer)

    module.Trainer.begin_step, module.Trainer.finish_epoch = at_step, at_evaluation


def _plant_memory(module: Any) -> None:  # noqa: ANN401
    put = module.MemoryTier.put

    def at_put(self: Any, state: dict[str, Any]) -> None:  # noqa: ANN401
        _meet("keep", state["step"])
        put(self, state)

    module.MemoryTier.put = at_put


def _plant_writer(module: Any) -> None:  # noqa: ANN401
    original = Path.open

    def at_open(self: Path, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401
        found = re.match(r"\.step-(\d+)\.pt\.", self.name)
        if found and mode == "xb":
            return _InHalves(self, int(found[1]))
        return original(self, mode, *arguments, **keywords)

    Path.open = at_open  # type: ignore[method-assign]
    if "ELASTIC_MNIST_TIER_NO_PAUSES" in os.environ:
        module._FIRST_PAUSE_SECONDS = module._LONGEST_PAUSE_SECONDS = 0.0


def _plant_signals(module: Any) -> None:  # noqa: ANN401
    begin = module.StopRequests.begin

    def at_begin(self: Any, *arguments: Any) -> None:  # noqa: ANN401
        _requests.append(self)
        begin(self, *arguments)

    module.StopRequests.begin = at_begin


def _plant_s3(module: Any) -> None:  # noqa: ANN401
    if "ELASTIC_MNIST_TIER_NO_PAUSES" in os.environ:
        module.RETRY_SECONDS = 0.5


_PLANTS: dict[str, Callable[[Any], None]] = {
    "elastic_mnist.training.trainer": _plant_trainer,
    "elastic_mnist.snapshots.memory": _plant_memory,
    "elastic_mnist.snapshots.writer": _plant_writer,
    "elastic_mnist.snapshots.storage.s3": _plant_s3,
    "elastic_mnist.worker.stop_requests": _plant_signals,
}


class _Hook(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _PLANTS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        loader = spec.loader
        assert isinstance(loader, importlib.machinery.SourceFileLoader)
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _PLANTS[name](module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "ELASTIC_MNIST_TIER_FAULTS" in os.environ:
    sys.meta_path.insert(0, _Hook())

# ruff: noqa: INP001 - no package: its directory is put on PYTHONPATH
"""Python imports this by itself where its directory is on PYTHONPATH: it has the faults planted in a worker.

In any process but a worker of a job under `elastic-mnist chaos` it does nothing. The `sitecustomize` that it stands in
front of, the user's or the system's, is run all the same.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_TARGET = "elastic_mnist.training.trainer"


class _Planter(importlib.abc.MetaPathFinder):
    """Finds the trainer where Python does, and plants the faults once it has been executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _TARGET:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        loader = spec.loader
        assert isinstance(loader, importlib.machinery.SourceFileLoader)
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            from elastic_mnist.chaos import planted  # noqa: PLC0415 - a worker alone needs it

            planted.plant(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _run_the_next() -> None:
    """Run the `sitecustomize` that would have been imported without this one."""
    here = Path(__file__).resolve().parent
    others = [entry for entry in sys.path if Path(entry).resolve() != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if "ELASTIC_MNIST_CHAOS_PLAN" in os.environ:
    sys.meta_path.insert(0, _Planter())
_run_the_next()

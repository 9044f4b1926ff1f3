"""Fault-tolerant elastic training of MNIST.

    torchrun --max_restarts=3 --nnodes=1:2 -m elastic_mnist

`__all__` is the public interface; every module below this one is private.

Invariant: importing the package imports nothing else, because every torchrun agent of the environment and every
restart of a worker pays for it. A public name is imported when it is first used.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic_mnist.errors import ElasticMnistError, UsageError
    from elastic_mnist.settings import Settings
    from elastic_mnist.training.model import ConvNet

__version__ = "0.1.0"  # the only place: the build reads it here
__all__ = ["ConvNet", "ElasticMnistError", "Settings", "UsageError", "__version__"]

_HOMES = {
    "ConvNet": "elastic_mnist.training.model",
    "ElasticMnistError": "elastic_mnist.errors",
    "Settings": "elastic_mnist.settings",
    "UsageError": "elastic_mnist.errors",
}

if not TYPE_CHECKING:  # which would take any name for one of the package's

    def __getattr__(name: str) -> object:
        """Import a public name from its module."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module  # noqa: PLC0415 - see the invariant

        return getattr(import_module(_HOMES[name]), name)

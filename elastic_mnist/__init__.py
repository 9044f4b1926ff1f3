"""Fault-tolerant elastic training of MNIST.

    torchrun --max_restarts=3 --nnodes=1:2 -m elastic_mnist

Importing the package imports nothing heavy: every restart of a worker and every torchrun agent of
the environment pays for what stands here.
"""

from typing import Final

__version__: Final = "0.1.0"
__all__ = ["__version__"]

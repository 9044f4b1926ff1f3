"""What the tests share."""

from pathlib import Path

import pytest

from elastic_mnist import data


@pytest.fixture(scope="session")
def mnist_dir() -> Path:
    """A directory with verified MNIST; fetched once, beside the package, where `scripts/train` looks too."""
    directory = Path(__file__).resolve().parent.parent / "data"
    data.ensure("mnist", directory)
    return directory

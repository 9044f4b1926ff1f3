"""Places of snapshots, for all tests of this room; a file may have a `storage` of its own kind."""

from pathlib import Path

import pytest
from places import Place

from elastic_mnist.snapshots.storage import LocalStorage


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    """An empty directory."""
    return LocalStorage(tmp_path)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A job's surroundings where nothing is yet."""
    return Place(tmp_path)


@pytest.fixture
def at_step_5(tmp_path: Path) -> Place:
    """A place with a run's record and its snapshot of step 5, in the middle of epoch 0."""
    return Place.at_step_5(tmp_path)

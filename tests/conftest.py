"""What the tests share."""

import signal
from pathlib import Path

import pytest

from elastic_mnist import data

pytest_plugins = ["place_fixtures"]


@pytest.fixture(scope="session")
def mnist_dir() -> Path:
    """A directory with verified MNIST; fetched once, beside the package, where `scripts/train` looks too."""
    directory = Path(__file__).resolve().parent.parent / "data"
    data.ensure("mnist", directory)
    return directory


@pytest.fixture(scope="session", autouse=True)
def _jobs_hear_all_signals() -> None:
    """Jobs start as from a terminal, where the tests run under nohup or in the background of a script, too.

    A signal that is ignored is ignored by whatever a process starts, one that is handled is not; to this process the
    handler is no more than that.
    """
    for sign in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(sign) is signal.SIG_IGN:
            signal.signal(sign, lambda _sign, _frame: None)

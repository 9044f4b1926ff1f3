"""A hundred seeds of five faults each, of all kinds, on real MNIST.

A command of its own, about a minute a seed on two cores:

    scripts/test -m chaos tests/test_chaos_long.py -s

Each seed's verdict and the pace are told as they come. ELASTIC_MNIST_TEST_SEED is the first seed (0),
ELASTIC_MNIST_TEST_SEEDS their number (100). Where a verdict is not valid, its logs and snapshots are kept.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

NUM_FAULTS = 5


@pytest.mark.chaos
@pytest.mark.timeout(8 * 3600)
def test_a_hundred_seeds(mnist_dir: Path) -> None:
    """Every seed's job survives its five faults as promised, and ends with the undisturbed weights."""
    first, count = (int(os.environ.get(f"ELASTIC_MNIST_TEST_{name}", default)) for name, default in LIMITS)
    failed, began = [], time.monotonic()
    for number, seed in enumerate(range(first, first + count), start=1):
        options = ("--seed", str(seed), "--faults", str(NUM_FAULTS), "--patience", "3")
        command = [sys.executable, "-m", "elastic_mnist.cli.main", "chaos", *options, "--", *training(mnist_dir)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            failed.append(seed)
            print(done.stdout + done.stderr)
        pace = (time.monotonic() - began) / number
        verdict = "valid" if done.returncode == 0 else f"status {done.returncode}"
        print(f"seed {seed}: {verdict}; {pace:.0f} s a seed, {pace * (count - number) / 60:.0f} min to go", flush=True)
    assert not failed


LIMITS = (("SEED", "0"), ("SEEDS", "100"))


def training(data_dir: Path) -> tuple[str, ...]:
    """Return the options of the job: 126 steps, the last of each epoch short."""
    return (
        *("--train_samples=4000", "--test_samples=300", "--epochs=2", f"--data_dir={data_dir}"),
        *("--global_batch_size=64", "--micro_batch_size=32", "--hang_timeout=5"),
    )

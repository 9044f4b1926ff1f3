"""The whole of MNIST at the defaults: minutes, so commands of their own.

scripts/test -m slow tests/test_full_size.py -s       about half an hour on two cores
"""

import random
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import pytest
from harness import Event, Job, free_port, plain, standalone, torchrun

from elastic_mnist.cli import audit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

NUM_KILLS = 10
NUM_STEPS = 590  # 5 epochs of 118


def test_five_epochs_with_ten_kills(mnist_dir: Path, tmp_path: Path) -> None:
    """Five epochs at the defaults reach 0.99, and with ten kills and two processes end with the very same weights."""
    line = torchrun("--max_restarts=3", "--nnodes=1:2", f"--master_port={free_port()}")
    with Job(tmp_path / "undisturbed", mnist_dir, line) as job:
        undisturbed = job.finish(within=3600)
    assert undisturbed["step"] == NUM_STEPS
    assert undisturbed["num_restarts"] == 0
    assert undisturbed["test_accuracy"] >= 0.99
    options = ("--global_batch_size=512", "--save_every_steps=10", "--sample_log=ledger")
    choose = random.Random(7)  # noqa: S311 - repeatable, not secret
    with Job(tmp_path / "killed", mnist_dir, standalone(2, max_restarts=NUM_KILLS), options) as job:
        for generation, step in enumerate(sorted(choose.sample(range(20, NUM_STEPS - 20, 15), NUM_KILLS))):
            job.wait_for_step(step, generation=generation)
            job.kill(choose.randrange(2))
        killed = job.finish(within=3600)
        for event in job.events("run.resumed") + job.events("epoch.finished"):
            print({key: event[key] for key in event if key not in ("timestamp", "level", "path")})
    for finished in (undisturbed, killed):
        print(finished)
    assert killed["num_restarts"] == NUM_KILLS
    assert killed["weights_sha256"] == undisturbed["weights_sha256"]
    assert killed["test_accuracy"] == undisturbed["test_accuracy"]
    assert audit.run(tmp_path / "killed" / "ledger", event_log=None, run_id=None) == 0


def one_epoch(directory: Path, data_dir: Path, options: Sequence[str]) -> Event:
    """Return the end of the first epoch."""
    with Job(directory, data_dir, plain(), ("--epochs=1", *options)) as job:
        job.finish(within=3600)
        (epoch,) = job.events("epoch.finished")
        return epoch


def test_exact_learns_like_allreduce(mnist_dir: Path, tmp_path: Path) -> None:
    """Over three seeds, `exact` and DDP's own sum differ in loss and accuracy by less than the seeds do."""
    found: dict[str, list[Event]] = {"exact": [], "allreduce": []}
    for seed in range(3):
        for sync, epochs in found.items():
            options = (f"--gradient_sync={sync}", f"--seed={seed}")
            epochs.append(one_epoch(tmp_path / f"{sync}{seed}", mnist_dir, options))
    for key in ("train_loss", "test_loss", "test_accuracy"):
        exact, plain_sum = ([epoch[key] for epoch in found[sync]] for sync in ("exact", "allreduce"))
        print(f"{key}: exact {exact}, allreduce {plain_sum}")
        spread_of_seeds = max(plain_sum) - min(plain_sum)
        assert abs(mean(exact) - mean(plain_sum)) < spread_of_seeds

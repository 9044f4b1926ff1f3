"""The same weights, bit for bit, whatever the world size was and whatever was killed.

Every digest is compared with that of an undisturbed run made here, by one process with one thread.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
from harness import SMALL, Job, fault, plain, standalone

from elastic_mnist.cli import audit

# 3 epochs of 1,000 samples: 64 does not divide them, 24 does not divide 64.
THREE_EPOCHS = (*SMALL, "--epochs=3")
# 2 steps with the sizes that are the defaults.
FULL_SIZE = ("--train_samples=1024", "--test_samples=300", "--global_batch_size=512", "--epochs=1")
# 6 steps, the third and the last one short.
SHORT = ("--train_samples=150", "--test_samples=50", "--global_batch_size=64", "--micro_batch_size=24", "--epochs=2")


def digest(directory: Path, data_dir: Path, launcher: Sequence[str], options: Sequence[str]) -> str:
    """Return the weights' digest of a job that nobody touches."""
    with Job(directory, data_dir, launcher, options) as job:
        return str(job.finish()["weights_sha256"])


@pytest.fixture(scope="module")
def reference(mnist_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The digests of one process with one thread."""
    jobs = {"three epochs": THREE_EPOCHS, "full size": FULL_SIZE, "short": SHORT}
    return {
        name: digest(tmp_path_factory.mktemp("reference"), mnist_dir, plain(), (*options, "--threads=1"))
        for name, options in jobs.items()
    }


@pytest.mark.parametrize(("world_size", "threads"), [(1, 2), (1, 4), (2, 1), (3, 1), (4, 2), (7, 1)])
def test_world_sizes_and_threads(
    world_size: int, threads: int, mnist_dir: Path, tmp_path: Path, reference: dict[str, str]
) -> None:
    """Any number of processes and of threads ends with the bits of one process with one thread."""
    launcher = plain() if world_size == 1 else standalone(world_size)
    with Job(tmp_path, mnist_dir, launcher, (*THREE_EPOCHS, f"--threads={threads}", "--sample_log=ledger")) as job:
        finished = job.finish()
        assert finished["world_size"] == world_size
        assert finished["step"] == 48
        assert finished["weights_sha256"] == reference["three epochs"]
    assert audit.run(tmp_path / "ledger", event_log=None, run_id=None) == 0


@pytest.mark.parametrize("world_size", [2, 3])
def test_full_size_steps(world_size: int, mnist_dir: Path, tmp_path: Path, reference: dict[str, str]) -> None:
    """Two steps with the default sizes give the same bits at another world size."""
    assert digest(tmp_path, mnist_dir, standalone(world_size), FULL_SIZE) == reference["full size"]


def test_allreduce_is_not_exact(mnist_dir: Path, tmp_path: Path) -> None:
    """With DDP's own floating-point sum the same comparison fails: the tests above can tell."""
    options = (*SMALL, "--epochs=1", "--gradient_sync=allreduce")
    alone = digest(tmp_path / "one", mnist_dir, plain(), options)
    assert alone == digest(tmp_path / "again", mnist_dir, plain(), options)
    assert alone != digest(tmp_path / "two", mnist_dir, standalone(2), options)


@pytest.mark.parametrize("step", range(6))
def test_killed_at_every_step(step: int, mnist_dir: Path, tmp_path: Path, reference: dict[str, str]) -> None:
    """A worker that is killed at any step of a job leaves no trace in the result, nor in what was used."""
    environment, fired = fault(tmp_path, "kill", rank=step % 2, step=step)
    options = (*SHORT, "--save_every_steps=2", "--sample_log=ledger")
    with Job(tmp_path, mnist_dir, standalone(2), options, environment) as job:
        finished = job.finish()
        assert fired.read_text().split() == [str(step % 2), str(step), "0"]
        assert finished["num_restarts"] == 1
        assert finished["step"] == 6
        assert finished["weights_sha256"] == reference["short"]
        (resumed,) = job.events("run.resumed")
        # Killed before the step's gradient: what the steps before it made is in memory.
        assert (resumed["source"], resumed["step"]) == (("memory", step) if step else ("fresh", 0))
        assert resumed["num_lost_steps"] == 0
    assert audit.run(tmp_path / "ledger", event_log=None, run_id=None) == 0


def test_stopped_and_resumed_at_other_world_sizes(mnist_dir: Path, tmp_path: Path, reference: dict[str, str]) -> None:
    """A job of 4 processes that is killed whole, then of 1, then of 3: the same bits, each sample once an epoch."""
    options = (*THREE_EPOCHS, "--save_every_steps=5", "--sample_log=ledger")
    for launcher, step in ((standalone(4), 8), (plain(), 27)):
        with Job(tmp_path, mnist_dir, launcher, options) as job:
            generation = len(job.events("run.started", whole_log=True))
            job.wait_for_step(step, generation=generation)
            job.kill_all()
            assert not job.events("run.finished")
    with Job(tmp_path, mnist_dir, standalone(3), options) as job:
        assert job.finish()["weights_sha256"] == reference["three epochs"]
        worlds = [event["world_size"] for event in job.events("run.started", whole_log=True)]
        assert worlds == [4, 1, 3]
    assert audit.run(tmp_path / "ledger", event_log=None, run_id=None) == 0

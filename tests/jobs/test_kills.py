"""Thirty kills in a row, at random ranks and steps, under the launcher line of the README; all recovered.

A command of its own, about three minutes on two cores:

    scripts/test -m slow tests/test_kills.py

Stock torchrun fails about one restart in three on a CPU. The seed is printed; ELASTIC_MNIST_TEST_SEED repeats it.
"""

import os
import random
import statistics
from datetime import datetime, timezone
from pathlib import Path

import pytest
from harness import Job, plain, standalone

KILLS_PER_JOB = 3  # what --max_restarts=3 allows
NUM_JOBS = 10
OPTIONS = (
    "--train_samples=4000",
    "--test_samples=300",
    "--global_batch_size=64",
    "--micro_batch_size=32",
    "--epochs=1",
    "--save_every_steps=5",
)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thirty_kills(mnist_dir: Path, tmp_path: Path) -> None:
    """Each of 30 random kills costs at most the step in flight, and each job ends with the undisturbed weights."""
    seed = int(os.environ.get("ELASTIC_MNIST_TEST_SEED", str(random.SystemRandom().randrange(10**6))))
    print(f"seed {seed}")
    choose = random.Random(seed)  # noqa: S311 - repeatable, not secret
    with Job(tmp_path / "undisturbed", mnist_dir, plain(), OPTIONS) as job:
        undisturbed = job.finish()
    assert undisturbed["step"] == 63
    recovery_seconds: list[float] = []
    for number in range(NUM_JOBS):
        with Job(tmp_path / f"job{number}", mnist_dir, standalone(2), OPTIONS) as job:
            for generation in range(KILLS_PER_JOB):
                rank, step = choose.randrange(2), choose.randrange(generation * 15, generation * 15 + 14)
                reached = job.wait_for_step(step, generation=generation)
                assert job.progress()[0] == generation
                job.kill(rank)
                killed_at = datetime.now(timezone.utc)
                print(f"job {number} generation {generation}: rank {rank} killed at step {reached}")
                (*_, resumed_again) = job.wait_for_event("run.resumed", count=generation + 1)
                resumed_at = datetime.fromisoformat(resumed_again["timestamp"].replace("Z", "+00:00"))
                recovery_seconds.append((resumed_at - killed_at).total_seconds())
            finished = job.finish()
            resumed = job.events("run.resumed")
            assert [event["generation"] for event in resumed] == [1, 2, 3]
            for event in resumed:
                assert event["num_lost_steps"] <= 1
                assert event["source"] == ("memory" if event["step"] else "fresh")
            assert finished["num_lost_steps"] == sum(event["num_lost_steps"] for event in resumed)
            assert [event["epoch"] for event in job.events("epoch.finished")] == [1]
            assert finished["weights_sha256"] == undisturbed["weights_sha256"]
    assert len(recovery_seconds) == NUM_JOBS * KILLS_PER_JOB
    print(
        f"from kill to resumed: median {statistics.median(recovery_seconds):.1f} s, max {max(recovery_seconds):.1f} s"
    )

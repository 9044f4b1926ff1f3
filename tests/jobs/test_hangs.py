"""Workers that hang without dying: noticed, told, replaced."""

import signal
from pathlib import Path

import pytest
from harness import SMALL, Job, eventually, fault, plain, standalone

OPTIONS = (
    *SMALL,
    "--dataset=synthetic",
    "--train_samples=600",
    "--test_samples=60",
    "--epochs=1",
    "--hang_timeout=4",
)


@pytest.fixture(scope="module")
def undisturbed_sha256(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of the small job when nothing hangs; one process, no torchrun."""
    directory = tmp_path_factory.mktemp("undisturbed")
    with Job(directory, directory, plain(), OPTIONS) as job:
        return str(job.finish()["weights_sha256"])


@pytest.mark.parametrize(("kind", "rank"), [("stop", 0), ("stop", 1), ("wedge", 1), ("spin", 1)])
def test_a_worker_that_hangs_is_told_and_replaced(
    kind: str, rank: int, tmp_path: Path, undisturbed_sha256: str
) -> None:
    """Stopped, wedged or spinning, it is named with its step and what it was doing; the job ends as if undisturbed."""
    environment, fired = fault(tmp_path, kind, rank=rank, step=3)
    with Job(tmp_path, tmp_path, standalone(2, max_restarts=1), OPTIONS, environment) as job:
        finished = job.finish()
        assert fired.read_text() == f"{rank} 3 0"
        (hung,) = job.events("worker.hung")
        assert (hung["level"], hung["generation"], hung["rank"], hung["step"]) == ("error", 0, rank, 3)
        assert hung["reason"].startswith("no progress for" if kind == "spin" else "no sign of life for")
        assert "while computing" in hung["reason"]
        assert hung.get("condition") == {"stop": "stopped", "wedge": "sleeping", "spin": None}[kind]
        if kind != "stop":  # nobody can ask a stopped process where it stands
            assert "_fire" in hung["stack"]
        (resumed,) = job.events("run.resumed")
        assert (resumed["source"], resumed["step"], resumed["num_lost_steps"]) == ("memory", 3, 0)
        assert finished["num_restarts"] == 1
        assert finished["weights_sha256"] == undisturbed_sha256


@pytest.mark.slow  # a bound of time, which a busy machine may miss
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_worker_costs_at_most_fifteen_seconds(rank: int, tmp_path: Path) -> None:
    """With a `--hang_timeout` of 5 s, the next generation has made a step within 15 s of the SIGSTOP."""
    with Job(tmp_path, tmp_path, standalone(2), (*OPTIONS, "--epochs=50", "--hang_timeout=5")) as job:
        job.wait_for_step(10)

        def goes_on() -> bool:
            started = [event["step"] for event in job.events("run.started") if event["generation"] == 1]
            return bool(started) and job.progress() > (1, started[0])

        job.kill(rank, signal.SIGSTOP)
        eventually(goes_on, within=15)
        (hung,) = job.events("worker.hung")
        assert (hung["rank"], hung["condition"]) == (rank, "stopped")


def test_a_single_process_that_spins_ends_itself(tmp_path: Path) -> None:
    """Without any launcher it tells where it stood, with its stack, and fails."""
    environment, fired = fault(tmp_path, "spin", rank=0, step=3)
    with Job(tmp_path, tmp_path, plain(), OPTIONS, environment) as job:
        assert job.wait(within=60) == 1
        assert fired.exists()
        (hung,) = job.events("worker.hung")
        assert (hung["step"], "_fire" in hung["stack"]) == (3, True)


def test_a_stopped_worker_alone_on_its_node_is_replaced(tmp_path: Path, undisturbed_sha256: str) -> None:
    """With no peer to miss it, its agent does."""
    environment, fired = fault(tmp_path, "stop", rank=0, step=3)
    with Job(tmp_path, tmp_path, standalone(1, max_restarts=1), OPTIONS, environment) as job:
        assert job.finish()["weights_sha256"] == undisturbed_sha256
        assert fired.exists()
        assert len(job.events("worker.hung")) == 1


def test_a_slow_step_is_no_hang(tmp_path: Path) -> None:
    """A step of many slow micro-batches that lasts longer than the timeout is let be: each of them counts."""
    environment, fired = fault(tmp_path, "none", rank=0, step=0)
    environment["ELASTIC_MNIST_TEST_CRAWL"] = "0.5"
    options = (*OPTIONS, "--global_batch_size=480", "--threads=1")  # steps of 20 and of 5 micro-batches, for two ranks
    with Job(tmp_path, tmp_path, standalone(2, max_restarts=0), options, environment) as job:
        finished = job.finish()
        assert fired.exists()
        assert finished["step"] == 2
        assert finished["wall_seconds"] > 4 + 1
        assert not job.events("worker.hung")


def test_a_job_that_does_not_get_on_stops_early(tmp_path: Path) -> None:
    """After four deaths at one and the same step the fifth is not tried, however many restarts there are."""
    environment, fired = fault(tmp_path, "raise", rank=1, step=3)
    environment["ELASTIC_MNIST_TEST_FAULT_AGAIN"] = "1"
    with Job(tmp_path, tmp_path, standalone(2, max_restarts=50), OPTIONS, environment) as job:
        assert job.wait() == 2
        assert fired.exists()
        raised = [event for event in job.events("run.failed") if "a planted fault" in event["reason"]]
        assert [event["generation"] for event in raised] == [0, 1, 2, 3]
        last = job.events("run.failed")[-1]
        assert last["reason"].startswith("4 generations in a row have ended at step 3; ")
        lines = [line for line in job.output.splitlines() if line.startswith("elastic_mnist: error: ")]
        assert len(lines) == 1
        assert "4 generations in a row have ended at step 3" in lines[0]
    with Job(tmp_path, tmp_path, standalone(2, max_restarts=0), OPTIONS) as job:  # put right, and started again
        assert job.finish()["num_restarts"] == 5  # the fifth generation, which gave up, had claimed its place


@pytest.mark.parametrize(
    ("sync", "poisoned"),
    [
        ("exact", "4"),
        *(pytest.param(*values, marks=pytest.mark.slow) for values in (("exact", "0"), ("allreduce", "4"))),
    ],
)
def test_a_poisoned_batch_is_skipped_where_that_is_asked_for(sync: str, poisoned: str, tmp_path: Path) -> None:
    """The job goes on from the state before the bad step, tells of it, and ends the same with a kill in between."""
    options = (*OPTIONS, "--on_nonfinite=rollback", f"--gradient_sync={sync}")
    digests = set()
    for name in ("calm", "killed"):
        environment, fired = fault(tmp_path / name, "kill", rank=1, step=6)
        environment["ELASTIC_MNIST_TEST_POISON"] = poisoned
        if name == "calm":
            environment["ELASTIC_MNIST_TEST_FAULT"] = f"none 1 6 0 {fired}"
        with Job(tmp_path / name, tmp_path, standalone(2, max_restarts=1), options, environment) as job:
            finished = job.finish()
            assert fired.exists()
            digests.add(finished["weights_sha256"])
            (skipped,) = job.events("step.skipped")
            assert (skipped["step"], skipped["num_skipped_steps"]) == (int(poisoned), 1)
            assert finished["step"] == 10
            (epoch,) = job.events("epoch.finished")
            assert 0 < epoch["train_loss"] < 2.5
    assert len(digests) == 1


def test_too_many_poisoned_batches_stop_the_job(tmp_path: Path) -> None:
    """Rolling back is bounded: a job whose every batch is bad fails with the number of those it skipped."""
    environment, fired = fault(tmp_path, "none", rank=0, step=0)
    environment["ELASTIC_MNIST_TEST_POISON"] = "all"
    options = (*OPTIONS, "--on_nonfinite=rollback", "--epochs=2")
    with Job(tmp_path, tmp_path, plain(), options, environment) as job:
        assert job.wait() == 1
        assert fired.exists()
        assert [event["num_skipped_steps"] for event in job.events("step.skipped")] == list(range(1, 11))
        assert "10 steps were skipped before" in job.events("run.failed")[0]["reason"]
    eventually(lambda: not list((tmp_path / "snapshots").glob(".*.tmp")))

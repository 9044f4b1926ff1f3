"""A worker that fails by itself: what is told of it, and what becomes of the job."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SMALL, Job, fault, plain, standalone

# 10 steps of one epoch, the last one short.
OPTIONS = (*SMALL, "--dataset=synthetic", "--train_samples=600", "--test_samples=60", "--epochs=1")
# One step of this learning rate leaves weights with which every gradient is beyond all bounds.
ABSURD = (*OPTIONS, "--lr=1e30", "--save_every_steps=1")


@pytest.fixture(scope="module")
def undisturbed_sha256(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of the small job when nothing fails; one process, no torchrun."""
    directory = tmp_path_factory.mktemp("undisturbed")
    with Job(directory, directory, plain(), OPTIONS) as job:
        return str(job.finish()["weights_sha256"])


def test_a_worker_that_raises_is_told_and_replaced(tmp_path: Path, undisturbed_sha256: str) -> None:
    """An exception at one rank is told once, with its reason and rank; the restarted job ends as if undisturbed."""
    environment, fired = fault(tmp_path, "raise", rank=1, step=3)
    options = (*OPTIONS, "--save_every_steps=2", "--memory_snapshot_every=0")
    with Job(tmp_path, tmp_path, standalone(2, max_restarts=1), options, environment) as job:
        finished = job.finish()
        assert fired.read_text() == "1 3 0"
        (failed,) = job.events("run.failed")
        assert failed["level"] == "error"
        assert (failed["generation"], failed["rank"]) == (0, 1)
        assert failed["reason"] == "RuntimeError: a planted fault"
        assert 'raise RuntimeError("a planted fault")' in failed["exception"]
        (resumed,) = job.events("run.resumed")
        assert (resumed["generation"], resumed["step"], resumed["num_lost_steps"]) == (1, 2, 1)
        assert finished["num_restarts"] == 1
        assert finished["weights_sha256"] == undisturbed_sha256


@pytest.fixture(scope="module")
def without_restarts(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, list[dict[str, Any]]]:
    """Exit status, output and events of a job whose rank 1 raises at step 3, with no restart to spare."""
    directory = tmp_path_factory.mktemp("without-restarts")
    environment, fired = fault(directory, "raise", rank=1, step=3)
    with Job(directory, directory, standalone(2, max_restarts=0), OPTIONS, environment) as job:
        status = job.wait()
        assert fired.read_text() == "1 3 0"
        return status, job.output, job.events()


def test_a_worker_that_raises_without_restarts_fails_the_job(
    without_restarts: tuple[int, str, list[dict[str, Any]]],
) -> None:
    """With no restart to spare the job ends as a failure, and the launcher's report has the rank and the exception."""
    status, output, events = without_restarts
    assert status == 1
    assert not [event for event in events if event["event"] == "run.finished"]
    # Which of the two counts as the root cause is torchrun's guess, by seconds; see the event log for that.
    failures = re.split(r"^\[\d\]:$", output.partition("elastic_mnist FAILED\n")[2], flags=re.MULTILINE)
    (failure,) = [part for part in failures if "RuntimeError: a planted fault" in part]
    assert "rank      : 1 (local_rank: 1)" in failure


def test_the_others_of_a_worker_that_raises_tell_no_failure_of_their_own(
    without_restarts: tuple[int, str, list[dict[str, Any]]],
) -> None:
    """Of two ranks the one that raised tells a failure; the other one a lost peer, if it is not ended before."""
    told = [(event["event"], event["rank"]) for event in without_restarts[2] if event["level"] != "info"]
    assert sorted({*told, ("peer.lost", 0)}) == [("peer.lost", 0), ("run.failed", 1)]
    assert len(told) == len(set(told))


def test_a_failure_has_its_step(without_restarts: tuple[int, str, list[dict[str, Any]]]) -> None:
    """`run.failed` has the step at which the rank failed."""
    (failed,) = [event for event in without_restarts[2] if event["event"] == "run.failed"]
    assert failed["step"] == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_leaves_with_success_is_replaced(rank: int, tmp_path: Path, undisturbed_sha256: str) -> None:
    """Exit status 0 in mid-epoch is no success: the others end, the job is restarted and ends as if undisturbed."""
    environment, fired = fault(tmp_path, "exit", rank=rank, step=3)
    options = (*OPTIONS, "--save_every_steps=2", "--memory_snapshot_every=0")
    with Job(tmp_path, tmp_path, standalone(2, max_restarts=1), options, environment) as job:
        finished = job.finish(within=60)
        assert fired.read_text() == f"{rank} 3 0"
        (lost,) = job.events("peer.lost")
        assert (lost["generation"], lost["rank"]) == (0, 1 - rank)
        (cause,) = job.events("worker.lost")
        assert (cause["generation"], cause["rank"], cause["step"]) == (0, rank, 3)
        (resumed,) = job.events("run.resumed")
        assert resumed["generation"] == 1
        assert resumed["step"] in ((2,) if rank else (0, 2))  # rank 0 may leave in the middle of writing step 2
        assert resumed["num_lost_steps"] == 3 - resumed["step"]
        assert finished["num_restarts"] == 1
        assert finished["weights_sha256"] == undisturbed_sha256


def test_a_worker_that_leaves_with_success_without_restarts_fails_the_job(tmp_path: Path) -> None:
    """With no restart to spare, exit status 0 of one rank in mid-epoch ends the job as a failure."""
    environment, fired = fault(tmp_path, "exit", rank=1, step=3)
    with Job(tmp_path, tmp_path, standalone(2, max_restarts=0), OPTIONS, environment) as job:
        assert job.wait(within=60) == 1
        assert fired.read_text() == "1 3 0"
        assert not job.events("run.finished")


@pytest.mark.parametrize("kind", ["kill", "exit"])
def test_a_worker_that_dies_without_a_word_is_named_once(kind: str, tmp_path: Path) -> None:
    """Of a job that ends with it, the log names rank and step of the one that was killed, and of no other."""
    environment, fired = fault(tmp_path, kind, rank=1, step=3)
    with Job(tmp_path, tmp_path, standalone(2, max_restarts=0), OPTIONS, environment) as job:
        assert job.wait(within=60) == 1
        assert fired.exists()
        (lost,) = job.events("worker.lost")
        assert (lost["generation"], lost["rank"], lost["step"], lost["level"]) == (0, 1, 3, "warning")
        assert lost["reason"].startswith("ended without a word while computing")


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_gradient_that_is_not_finite_stops_the_job(num_processes: int, tmp_path: Path) -> None:
    """All ranks stop at the bad step and name it; what is saved is the state before it, and it is finite."""
    with Job(tmp_path, tmp_path, standalone(num_processes, max_restarts=0), ABSURD) as job:
        assert job.wait() == 1, job.output
        failed = job.events("run.failed")
        assert sorted(event["rank"] for event in failed) == list(range(num_processes))
        for event in failed:
            assert event["reason"].startswith("step 1: the gradient of ")
            assert "not finite" in event["reason"]
            assert "--lr" in event["reason"]
        assert [event["step"] for event in job.events("snapshot.saved")] == [1]
        assert not job.events("epoch.finished")
    (snapshot,) = (tmp_path / "snapshots").glob("*.pt")
    assert snapshot.name == "step-00000001.pt"
    state = torch.load(snapshot, weights_only=True)
    assert state["step"] == 1
    for weights in state["model"].values():
        assert weights.isfinite().all()

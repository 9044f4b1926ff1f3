"""Workers are killed; the job goes on and ends as if nobody had touched it."""

import signal
from pathlib import Path

import psutil
import pytest
from harness import SMALL, Job, alive, eventually, plain, standalone

EVERY_5 = (*SMALL, "--save_every_steps=5")


@pytest.fixture(scope="module")
def undisturbed_sha256(mnist_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of the small job when nobody touches it; one process, no torchrun."""
    with Job(tmp_path_factory.mktemp("undisturbed"), mnist_dir, plain(), SMALL) as job:
        return str(job.finish()["weights_sha256"])


@pytest.mark.parametrize("rank", [1, 0])
def test_killed_worker_is_replaced(rank: int, mnist_dir: Path, tmp_path: Path, undisturbed_sha256: str) -> None:
    """With no memory tier, a job whose worker is killed resumes from the newest snapshot and ends as undisturbed."""
    with Job(tmp_path, mnist_dir, standalone(2), (*EVERY_5, "--memory_snapshot_every=0")) as job:
        job.wait_for_event("snapshot.saved")  # it is written in the background, and a disk may be slow
        reached = job.wait_for_step(8)
        saved = job.events("snapshot.saved")[-1]["step"]
        job.kill(rank)
        finished = job.finish()
        (resumed,) = job.events("run.resumed")
        assert resumed["source"] == "storage"
        assert resumed["step"] % 5 == 0
        # The kill may fall some steps after the look at the progress.
        assert resumed["step"] >= saved
        assert Path(resumed["path"]).name == f"step-{resumed['step']:08d}.pt"
        assert resumed["num_lost_steps"] >= reached - resumed["step"]
        assert finished["num_lost_steps"] == resumed["num_lost_steps"]
        assert finished["num_restarts"] == 1
        assert finished["step"] == 32
        assert finished["weights_sha256"] == undisturbed_sha256


def test_kill_before_the_first_snapshot(mnist_dir: Path, tmp_path: Path, undisturbed_sha256: str) -> None:
    """A kill before any snapshot of either tier starts the same run afresh, and tells how many steps that cost."""
    with Job(tmp_path, mnist_dir, standalone(2), (*SMALL, "--memory_snapshot_every=0")) as job:
        job.wait_for_step(3)
        job.kill(1)
        assert job.finish()["weights_sha256"] == undisturbed_sha256
        (resumed,) = job.events("run.resumed")
        assert (resumed["source"], resumed["step"]) == ("fresh", 0)
        assert resumed["num_lost_steps"] >= 3
        assert len({event["run_id"] for event in job.events("run.started")}) == 1


def test_survivor_ends_at_once(mnist_dir: Path, tmp_path: Path) -> None:
    """A rank whose peer is gone says so and ends by itself, before the launcher would have to kill it."""
    with Job(tmp_path, mnist_dir, standalone(2, max_restarts=1), SMALL) as job:
        job.wait_for_step(3)
        survivor = job.worker(0)
        job.kill(1)
        eventually(lambda: not alive(survivor), within=5, what="the survivor's end")
        job.finish()


def test_no_worker_outlives_a_killed_agent(mnist_dir: Path, tmp_path: Path) -> None:
    """SIGKILL of the agent ends its workers: none trains on as an orphan."""
    with Job(tmp_path, mnist_dir, standalone(2), SMALL) as job:
        job.wait_for_step(2)
        workers = job.workers()
        assert len(workers) == 2
        job.process.kill()
        eventually(lambda: not any(map(alive, workers)), within=5, what="no orphans")


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_agent_told_to_stop_ends_its_workers(sign: signal.Signals, mnist_dir: Path, tmp_path: Path) -> None:
    """SIGTERM or SIGINT of the agent ends the workers and the agent within seconds, not after torchrun's 30 s."""
    with Job(tmp_path, mnist_dir, standalone(2), SMALL) as job:
        job.wait_for_step(2)
        workers = job.workers()
        job.process.send_signal(sign)
        eventually(lambda: not any(map(alive, workers)), within=5, what="the workers' end")
        assert job.wait(within=10) != 0


def test_kill_during_start_up(mnist_dir: Path, tmp_path: Path, undisturbed_sha256: str) -> None:
    """A worker that is killed while it still imports is replaced like any other."""
    with Job(tmp_path, mnist_dir, standalone(2), SMALL) as job:
        job.kill(1)
        assert job.progress() == (-1, -1)
        assert job.finish()["weights_sha256"] == undisturbed_sha256


def _site_without_package(tmp_path: Path) -> Path:
    """A virtual environment with all that this one has installed, but not this package and its entry point."""
    import site  # noqa: PLC0415
    import sys  # noqa: PLC0415
    import venv  # noqa: PLC0415

    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    there = tmp_path / "venv" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    for here in filter(Path.is_dir, map(Path, site.getsitepackages())):  # Debian names some that are not there
        for entry in here.iterdir():
            target = there / entry.name
            if "elastic_mnist" not in entry.name and not target.exists():
                target.symlink_to(entry)
    return tmp_path / "venv" / "bin" / "python"


def test_recovers_without_the_plug_in(mnist_dir: Path, tmp_path: Path, undisturbed_sha256: str) -> None:
    """With the package on PYTHONPATH only, no plug-in in the agent, three kills in a row are recovered all the same."""
    python = _site_without_package(tmp_path)
    launcher = (str(python), "-m", "torch.distributed.run", *standalone(2)[3:])
    repository = str(Path(__file__).resolve().parents[2])
    with Job(tmp_path / "job", mnist_dir, launcher, EVERY_5, {"PYTHONPATH": repository}) as job:
        for generation, (rank, step) in enumerate([(1, 3), (0, 9), (1, 14)]):
            job.wait_for_step(step, generation=generation)
            job.kill(rank)
        assert job.finish()["weights_sha256"] == undisturbed_sha256
        assert "elastic rendezvous" not in job.output
        assert len(job.events("run.resumed")) == 3


def test_job_leaves_nothing_behind(mnist_dir: Path, tmp_path: Path) -> None:
    """A finished job leaves its snapshots, their manifests, the record and the log; no temporary file, no process."""
    with Job(tmp_path, mnist_dir, standalone(2), EVERY_5) as job:
        job.wait_for_step(4)
        workers = job.workers()
        job.kill(0)
        job.finish()
        steps = [event["step"] for event in job.events("snapshot.saved")][-3:]
        assert steps[-1] == 32
        assert not any(map(alive, workers))
        assert not [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(tmp_path)]
        names = sorted(path.name for path in (tmp_path / "snapshots").iterdir())
        assert names == sorted(
            ["events.jsonl", "run.json", *(f"step-{step:08d}.{kind}" for step in steps for kind in ("json", "pt"))]
        )

"""A user's mistake costs seconds and one line, not a traceback and not a round of restarts."""

import gzip
import shutil
from pathlib import Path

import pytest
from harness import SMALL, Job, contents, free_port, plain, standalone, torchrun

LAUNCHERS = {
    "python": plain(),
    "standalone": standalone(2),
    "elastic": torchrun("--max_restarts=3", "--nnodes=1:2", f"--master_port={free_port()}"),
    "no restarts": standalone(1, max_restarts=0),
    "one node, no rendezvous named": torchrun("--nproc_per_node=2", "--max_restarts=3"),
    "fixed size": torchrun("--nnodes=1", "--max_restarts=3", f"--master_port={free_port()}"),
    "in a file": torchrun(
        *("--rdzv_backend=c10d", "--rdzv_conf=store_type=file", "--rdzv_endpoint=rendezvous"),
        *("--nnodes=1:2", "--nproc_per_node=2", "--max_restarts=3"),
    ),
    "by name": torchrun("--rdzv_backend=elastic_mnist", f"--rdzv_endpoint=127.0.0.1:{free_port()}", "--max_restarts=3"),
}


def refused(job: Job, *words: str) -> None:
    """Assert that the job ended with status 2 and one line of ours that has these words."""
    assert job.wait(within=30) == 2, job.output
    lines = [line for line in job.output.splitlines() if line.startswith("elastic_mnist: error: ")]
    assert len(lines) == 1, job.output
    for word in words:
        assert word in lines[0]
    assert "Traceback" not in job.output


@pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=LAUNCHERS.keys())
def test_bad_option(launcher: tuple[str, ...], tmp_path: Path) -> None:
    """An unknown option is told before a worker starts, with the one that was probably meant."""
    with Job(tmp_path, tmp_path, launcher, ("--epoch", "3")) as job:
        refused(job, "--epoch: no such option", "--epochs")


@pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=LAUNCHERS.keys())
def test_unwritable_snapshot_path(launcher: tuple[str, ...], mnist_dir: Path, tmp_path: Path) -> None:
    """A regular file in the way of the snapshot path is named before the first step."""
    (tmp_path / "file").write_text("in the way")
    with Job(tmp_path, mnist_dir, launcher, (*SMALL, "--snapshot_path", "file/snapshots")) as job:
        refused(job, "--snapshot_path", "file/snapshots", "Not a directory")


def test_read_only_snapshot_path(mnist_dir: Path, tmp_path: Path) -> None:
    """A snapshot path on a read-only file system is refused before the first step."""
    with Job(tmp_path, mnist_dir, standalone(1), (*SMALL, "--snapshot_path", "/proc/snapshots")) as job:
        refused(job, "--snapshot_path /proc/snapshots")


@pytest.mark.parametrize("launcher", [standalone(2), plain()], ids=["standalone", "python"])
def test_missing_data(launcher: tuple[str, ...], tmp_path: Path) -> None:
    """Data that is not there and cannot be fetched is named, with the choices."""
    nowhere = {"ELASTIC_MNIST_MIRRORS": "", "PATH": "/nowhere"}
    with Job(tmp_path, tmp_path / "empty", launcher, SMALL, nowhere) as job:
        refused(job, str(tmp_path / "empty"), "train-images-idx3-ubyte", "--dataset synthetic")


DAMAGES = {
    "short by a byte": lambda data: data[:-1],
    "empty": lambda _: b"",
    "a flipped byte": lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
    "foreign": lambda _: gzip.compress(b"<html>not found</html>"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_data(damage: "object", mnist_dir: Path, tmp_path: Path) -> None:
    """A damaged data file that cannot be fetched anew is named."""
    assert callable(damage)
    shutil.copytree(mnist_dir / "MNIST", tmp_path / "data" / "MNIST")
    labels = tmp_path / "data" / "MNIST" / "raw" / "train-labels-idx1-ubyte"
    labels.write_bytes(damage(labels.read_bytes()))
    nowhere = {"ELASTIC_MNIST_MIRRORS": "", "PATH": "/nowhere"}
    with Job(tmp_path, tmp_path / "data", standalone(1), SMALL, nowhere) as job:
        refused(job, str(labels))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("--seed=1", "seed was 0 and is now 1"),
        ("--lr=0.01", "lr was 0.001 and is now 0.01"),
        ("--train_samples=900", "train_samples was 1000 and is now 900"),
        ("--global_batch_size=32", "global_batch_size was 64 and is now 32"),
        ("--precision=bf16", "precision was fp32 and is now bf16"),
    ],
)
def test_other_job_on_the_same_path(
    change: str, field: str, mnist_dir: Path, finished_job: Path, tmp_path: Path
) -> None:
    """A job under other settings is refused by the field's name on another job's path, and touches nothing there."""
    before = contents(finished_job)
    options = (*SMALL, "--epochs=3", "--snapshot_path", str(finished_job), "--event_log", str(tmp_path / "log"), change)
    with Job(tmp_path, mnist_dir, plain(), options) as job:
        refused(job, field, "--accept_changes")
    assert contents(finished_job) == before


@pytest.fixture(scope="module")
def finished_job(mnist_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The snapshots of a small job that is finished."""
    directory = tmp_path_factory.mktemp("finished")
    with Job(directory, mnist_dir, plain(), SMALL) as job:
        job.finish()
    return directory / "snapshots"


def test_accepted_change(mnist_dir: Path, finished_job: Path, tmp_path: Path) -> None:
    """`--accept_changes` goes on under the new settings, and says what changed."""
    shutil.copytree(finished_job, tmp_path / "snapshots")
    options = (*SMALL, "--epochs=3", "--lr=0.0001", "--accept_changes")
    with Job(tmp_path, mnist_dir, plain(), options) as job:
        job.finish()
        (changed,) = job.events("run.settings_changed")
        assert changed["changed"] == ["lr was 0.001 and is now 0.0001"]
    # From here on the new settings are the job's: no need to accept them again.
    with Job(tmp_path, mnist_dir, plain(), (*SMALL, "--epochs=4", "--lr=0.0001")) as job:
        job.finish()


def test_help_needs_no_worker(tmp_path: Path) -> None:
    """`--help` under torchrun is printed once, by the agent, and exits 0."""
    with Job(tmp_path, tmp_path, standalone(2), ("--help",)) as job:
        assert job.wait(within=30) == 0
        assert job.output.count("passes over the training set") == 1


def test_occupied_port(mnist_dir: Path, tmp_path: Path) -> None:
    """A port that another program holds is named, with the way out."""
    import socket  # noqa: PLC0415

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        launcher = torchrun("--nnodes=1:2", f"--master_port={port}")
        with Job(tmp_path, mnist_dir, launcher, SMALL) as job:
            refused(job, f"127.0.0.1:{port}", "--master_port")

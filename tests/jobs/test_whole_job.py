"""The whole job: the line that people type, and starting it again after everything was killed."""

import shutil
from pathlib import Path

import pytest
import torch
from harness import SMALL, Job, contents, plain, standalone, torchrun

EVERY_5 = (*SMALL, "--save_every_steps=5")


def test_exact_line(mnist_dir: Path, tmp_path: Path) -> None:
    """The README's line, alone on one machine, in a directory with nothing but the data, trains and exits 0."""
    (tmp_path / "data").symlink_to(mnist_dir)
    line = torchrun("--max_restarts=3", "--nnodes=1:2")
    options = ("--epochs", "1", "--train_samples", "4096")
    with Job(tmp_path, Path("data"), line, options, is_forked=False) as job:
        job.wait_for_step(1)  # the static rendezvous would wait 900 s for a second node
        finished = job.finish()
        assert finished["step"] == 8
        assert finished["epoch"] == 1
        (epoch,) = job.events("epoch.finished")
        assert epoch["num_test_samples"] == 10_000
        assert epoch["test_accuracy"] > 0.6
        assert "in place of the static one" in job.output


def test_plain_python(mnist_dir: Path, tmp_path: Path) -> None:
    """`python -m elastic_mnist`, without torchrun, is the same program."""
    with Job(tmp_path, mnist_dir, plain(), SMALL, is_forked=False) as job:
        assert job.finish()["step"] == 32


def test_killed_job_goes_on_where_its_newest_snapshot_was(mnist_dir: Path, tmp_path: Path) -> None:
    """After a kill of everything, the job goes on at the step after the newest snapshot, at another world size."""
    with Job(tmp_path, mnist_dir, standalone(2), EVERY_5) as job:
        job.wait_for_event("snapshot.saved", count=2)
        job.wait_for_step(12)
        job.kill_all()
        newest = job.events("snapshot.saved")[-1]
        first_run_id = newest["run_id"]
    with Job(tmp_path, mnist_dir, plain(), EVERY_5) as job:
        finished = job.finish()
        (resumed,) = job.events("run.resumed")
        # The kill may fall between a snapshot's end and the line that tells of it.
        assert resumed["step"] in (newest["step"], newest["step"] + 5)
        assert Path(resumed["path"]).name == f"step-{resumed['step']:08d}.pt"
        assert resumed["run_id"] == first_run_id
        # The first step that it makes is the one after: 64 samples on, in the same order.
        assert resumed["samples_in_epoch"] == resumed["step"] % 16 * 64
        assert job.events("snapshot.saved")[0]["step"] > resumed["step"]
        assert finished["step"] == 32
        epochs = job.events("epoch.finished", whole_log=True)
    with Job(tmp_path / "undisturbed", mnist_dir, plain(), SMALL) as job:
        undisturbed = job.finish()
        assert undisturbed["weights_sha256"] == finished["weights_sha256"]
        losses = {(event["epoch"], event["train_loss"]) for event in job.events("epoch.finished")}
        assert {(event["epoch"], event["train_loss"]) for event in epochs} == losses  # also of the epoch cut in two


@pytest.mark.parametrize("epochs", [2, 1])
def test_finished_job_started_again(epochs: int, mnist_dir: Path, tmp_path: Path) -> None:
    """A finished job that is started again, with as many epochs or fewer, says so, exits 0 and touches no file."""
    with Job(tmp_path, mnist_dir, plain(), SMALL) as job:
        digest = job.finish()["weights_sha256"]
    before = contents(tmp_path / "snapshots")
    with Job(tmp_path, mnist_dir, standalone(2), (*SMALL, f"--epochs={epochs}")) as job:
        assert job.wait() == 0
        assert "run.nothing_to_do" in job.output
        assert digest in job.output
    assert contents(tmp_path / "snapshots") == before


def test_more_epochs(mnist_dir: Path, tmp_path: Path) -> None:
    """More epochs after the end go on from there, and give what asking for them at once would have given."""
    with Job(tmp_path, mnist_dir, plain(), SMALL) as job:
        job.finish()
    with Job(tmp_path, mnist_dir, plain(), (*SMALL, "--epochs=3")) as job:
        more = job.finish()
        assert [event["epoch"] for event in job.events("epoch.finished")] == [3]
    with Job(tmp_path / "at_once", mnist_dir, plain(), (*SMALL, "--epochs=3")) as job:
        assert job.finish()["weights_sha256"] == more["weights_sha256"]


def test_resume_from_another_place(mnist_dir: Path, tmp_path: Path) -> None:
    """`--resume_from` starts a new run from a snapshot elsewhere, and leaves that place as it is."""
    with Job(tmp_path / "old", mnist_dir, plain(), (*SMALL, "--epochs=1")) as job:
        job.finish()
    before = contents(tmp_path / "old")
    for number, location in enumerate(("../old/snapshots", "../old/snapshots/step-00000016.pt")):
        with Job(tmp_path / f"new{number}", mnist_dir, plain(), (*SMALL, "--resume_from", location)) as job:
            finished = job.finish()
            (resumed,) = job.events("run.resumed")
            assert (resumed["source"], resumed["step"], resumed["epoch"]) == ("file", 16, 1)
            assert finished["step"] == 32
    assert contents(tmp_path / "old") == before


def test_snapshot_loads_as_plain_data(mnist_dir: Path, tmp_path: Path) -> None:
    """A snapshot is what any script loads with `weights_only=True`, and its digest is the one that was told."""
    with Job(tmp_path, mnist_dir, plain(), SMALL) as job:
        digest = job.finish()["weights_sha256"]
    state = torch.load(tmp_path / "snapshots" / "step-00000032.pt", weights_only=True)
    assert (state["epoch"], state["step"], state["samples_in_epoch"]) == (2, 32, 0)
    from elastic_mnist.training.model import ConvNet, weights_sha256  # noqa: PLC0415

    bare = ConvNet()
    bare.load_state_dict(state["model"])
    assert weights_sha256(bare.state_dict()) == digest


def test_damaged_newest_snapshot(mnist_dir: Path, tmp_path: Path) -> None:
    """A damaged newest snapshot is named and set aside, the one before is taken, and the result is the same."""
    with Job(tmp_path, mnist_dir, plain(), EVERY_5) as job:
        undisturbed = job.finish()
        before = job.events("snapshot.saved")[-2]["step"]
    newest = tmp_path / "snapshots" / "step-00000032.pt"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    with Job(tmp_path, mnist_dir, plain(), EVERY_5) as job:
        assert job.finish()["weights_sha256"] == undisturbed["weights_sha256"]
        (rejected,) = job.events("snapshot.rejected")
        assert rejected["path"] == str(newest)
        (resumed,) = job.events("run.resumed")
        assert resumed["step"] == before
    assert newest.with_name("step-00000032.pt.rejected").read_bytes() == data


def test_save_only_at_the_end(mnist_dir: Path, tmp_path: Path) -> None:
    """`--save_every 0` saves once, at the end."""
    with Job(tmp_path, mnist_dir, plain(), (*SMALL, "--save_every=0")) as job:
        job.finish()
        assert [event["step"] for event in job.events("snapshot.saved")] == [32]


def test_memory_storage(mnist_dir: Path, tmp_path: Path) -> None:
    """A job whose snapshots go to memory:// trains, and its event log lies in the working directory."""
    with Job(tmp_path, mnist_dir, plain(), (*SMALL, "--snapshot_path=memory://here")) as job:
        assert job.wait() == 0, job.output
    assert '"run.finished"' in (tmp_path / "events.jsonl").read_text()
    assert not (tmp_path / "snapshots").exists()


def test_full_disk(mnist_dir: Path, tmp_path: Path) -> None:
    """A snapshot that cannot be written is told and the training goes on; the job fails if it is the final one."""
    import subprocess  # noqa: PLC0415

    small_disk = tmp_path / "snapshots"
    small_disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small_disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    try:
        with Job(tmp_path, mnist_dir, plain(), SMALL) as job:
            assert job.wait() == 1
            failed = job.events("snapshot.failed")
            assert [Path(event["path"]).name for event in failed] == ["step-00000016.pt", "step-00000032.pt"]
            assert all("No space left" in event["reason"] for event in failed)
            assert "the last snapshot could not be saved" in job.events("run.failed")[0]["reason"]
            assert not list(small_disk.glob("step-*"))
    finally:
        subprocess.run(["umount", str(small_disk)], check=True)
        shutil.rmtree(small_disk)

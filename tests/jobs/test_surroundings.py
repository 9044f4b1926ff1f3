"""A worker in odd surroundings: streams that are closed or full, a stale environment, foreign snapshots."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Job, plain

from elastic_mnist.errors import UsageError
from elastic_mnist.ipc.environment import WorkerEnvironment

TINY = ("--train_samples=150", "--test_samples=50", "--global_batch_size=64", "--micro_batch_size=24")


@pytest.mark.parametrize("redirection", ["| head -n 1", ">/dev/full", ">&-", ">&- 2>&-"])
def test_output_that_nobody_takes(redirection: str, mnist_dir: Path, tmp_path: Path) -> None:
    """A job whose standard output is closed, full or broken trains to its end, and its log file has all of it."""
    command = " ".join([*plain(), *TINY, "--epochs=1", "--data_dir", str(mnist_dir)])
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    shell = ["bash", "-c", f"set -o pipefail; {command} {redirection}"]
    done = subprocess.run(shell, cwd=tmp_path, env=buffered, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert '"run.finished"' in (tmp_path / "snapshots" / "events.jsonl").read_text()


@pytest.mark.parametrize(
    "stale",
    [
        {"RANK": "5", "WORLD_SIZE": "2"},
        {"RANK": "-1", "WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "0"},
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "0"},
        {"RANK": "x", "WORLD_SIZE": "1"},
        {"RANK": "0"},
    ],
    ids=str,
)
def test_stale_environment_is_told(stale: dict[str, str]) -> None:
    """Launcher variables that do not fit together are one line that says to unset RANK."""
    with pytest.raises(UsageError, match=r"^environment: .*unset RANK$"):
        WorkerEnvironment.from_environment({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **stale})


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "another width": lambda state: state["model"].update({"classifier.3.weight": torch.zeros(10, 64)}),
    "no weights": lambda state: state["model"].clear(),
    "no optimizer": lambda state: state["optimizer"].clear(),
    "progress of another program": lambda state: state["progress"].update({"speed": 1}),
    "beyond the epoch": lambda state: state.update(samples_in_epoch=10**9),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_snapshot_that_does_not_fit_is_refused(
    change: Callable[[dict[str, Any]], object], mnist_dir: Path, tmp_path: Path
) -> None:
    """A snapshot of another network or program is one line that names the file, and exit status 2."""
    with Job(tmp_path / "old", mnist_dir, plain(), (*TINY, "--epochs=1", "--save_every_steps=2")) as job:
        job.finish()
    state = torch.load(tmp_path / "old" / "snapshots" / "step-00000002.pt", weights_only=True)
    change(state)
    torch.save(state, tmp_path / "changed.pt")
    options = (*TINY, "--epochs=1", f"--resume_from={tmp_path}/changed.pt")
    with Job(tmp_path / "new", mnist_dir, plain(), options) as job:
        assert job.wait(within=60) == 2, job.output
        (line,) = [line for line in job.output.splitlines() if line.startswith("elastic_mnist: error: ")]
        assert "changed.pt" in line
        assert "Traceback" not in job.output


FULL_LEDGER_DISK = """
import os, sys
real = os.write
def write(descriptor, data):
    if os.readlink(f"/proc/self/fd/{descriptor}").endswith("rank-00000.jsonl"):
        raise OSError(28, "No space left on device")
    return real(descriptor, data)
os.write = write
from elastic_mnist.__main__ import main
main(sys.argv[1:])
"""


def test_full_ledger_disk_does_not_stop_the_training(mnist_dir: Path, tmp_path: Path) -> None:
    """A ledger that cannot be written is told once, and the job ends well."""
    options = (*TINY, "--epochs=1", "--sample_log=ledger")
    with Job(tmp_path, mnist_dir, (sys.executable, "-c", FULL_LEDGER_DISK), options) as job:
        job.finish()
        (failed,) = job.events("ledger.failed")
        assert failed["reason"] == "No space left on device"

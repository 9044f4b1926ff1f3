"""`elastic-mnist audit`: what it prints, its exit status, and what it refuses."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sample_logs import NUM_SAMPLES, RUN_ID, LoggedRun

from elastic_mnist.cli.main import main


def test_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The verdict and the run first; then the counts, the steps made again by generation, and the skipped ones."""
    run = LoggedRun(tmp_path)
    run.log("step.skipped", generation=0, step=1)
    assert main(["audit", str(run.directory)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"valid     run {RUN_ID}",
        f"          6 committed steps with {2 * NUM_SAMPLES} samples",
        "          2 whole epochs",
        "          generation 0: 2 steps did not count and were made again",
        "          1 of the steps had no finite gradient and were skipped: 1",
    ]


def test_findings_are_limited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Five findings of a kind are printed, then the number of the others, and the event log that was read."""
    run = LoggedRun(tmp_path)
    for rank in (1, 2):
        run.path(rank).unlink()
    assert main(["audit", str(run.directory)]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"unknown   run {RUN_ID}", f"          by the event log {run.event_log}"]
    findings = [line for line in lines[1:] if line.startswith("unknown")]
    assert len(findings) == 6
    assert findings[-1].startswith("unknown   and ")
    assert findings[-1].endswith(" more")


def tool(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    """Run the console command."""
    command = [sys.executable, "-m", "elastic_mnist.cli.main", "audit", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_exit_status(tmp_path: Path) -> None:
    """The command ends with 0 for valid, 1 for invalid and 3 for unknown, and prints the verdict first."""
    valid, invalid, unknown = (LoggedRun(tmp_path / name) for name in ("valid", "invalid", "unknown"))
    invalid.change(0, 1, 3, lambda _: [])
    unknown.path(1).unlink()
    for run, verdict, status in ((valid, "valid", 0), (invalid, "invalid", 1), (unknown, "unknown", 3)):
        done = tool(run.directory, "--event_log", run.event_log)
        assert done.returncode == status, done.stderr
        assert done.stdout.startswith(f"{verdict} ")
        assert done.stderr == ""


def test_what_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    """Missing sample logs, a missing event log, a named one that is not there: status 2, one line with the way out."""
    run = LoggedRun(tmp_path / "run")
    (tmp_path / "nothing").mkdir()
    alone = tmp_path / "far" / "away" / "ledger"
    shutil.copytree(run.directory, alone)
    for arguments, words in (
        ((tmp_path / "nothing", "--event_log", run.event_log), ("no sample logs there", "--sample_log")),
        ((tmp_path / "nowhere", "--event_log", run.event_log), ("no sample logs there", "--sample_log")),
        ((alone,), ("no event log beside it", RUN_ID, "--event_log")),
        ((alone, "--event_log", run.event_log, "--run_id", "other"), ("does not tell of run other", "--run_id")),
        ((run.directory, "--event_log", tmp_path / "nowhere"), ("--event_log", "nowhere", "No such file")),
    ):
        done = tool(*arguments)
        assert done.returncode == 2, done.stdout
        (line,) = done.stderr.splitlines()
        assert line.startswith("elastic-mnist: error: ")
        for word in words:
            assert word in line

"""`elastic-mnist chaos` itself: a real job under a few faults, and what its parts do to real processes and files."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import eventually

from elastic_mnist.tools.chaos import checkers, history, injector, leftovers
from elastic_mnist.tools.chaos.history import Terms
from elastic_mnist.tools.chaos.injector import JobPlan
from elastic_mnist.tools.chaos.plan import Fault
from elastic_mnist.tools.chaos.planted import Marks

PLANT = Path(injector.__file__).parent / "plant"

# 16 steps of real MNIST; seconds are given thrice, because other tests run beside.
COMMAND = (
    *("--seed=3", "--faults=3", "--kinds=damage,raise,nan", "--nproc=2", "--nodes=1", "--patience=3"),
    *("--", "--train_samples=1000", "--test_samples=100", "--epochs=1", "--save_every_steps=2"),
    *("--global_batch_size=64", "--micro_batch_size=32"),
)


def tool(*arguments: object) -> "subprocess.CompletedProcess[str]":
    """Run the console command."""
    command = [sys.executable, "-m", "elastic_mnist.tools.cli", "chaos", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture(scope="module")
def done(mnist_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, "subprocess.CompletedProcess[str]"]:
    """The command's directory and what it printed; its report for machines is `report.json` in the directory above."""
    directory = tmp_path_factory.mktemp("chaos") / "jobs"
    report = directory.with_name("report.json")
    return directory, tool("--directory", directory, "--json", report, *COMMAND, "--data_dir", mnist_dir)


def report_of(directory: Path) -> dict[str, Any]:
    """Return the report for machines."""
    report: dict[str, Any] = json.loads(directory.with_name("report.json").read_text())
    return report


def test_a_real_job_under_real_faults(done: tuple[Path, "subprocess.CompletedProcess[str]"]) -> None:
    """An exception, a poisoned batch, a killed agent with a damaged snapshot: all fired, all valid, exit status 0."""
    directory, process = done
    assert process.returncode == 0, process.stdout + process.stderr
    report = report_of(directory)
    assert report["verdict"] == "valid"
    assert {fault["fault"]["kind"] for fault in report["faults"]} == {"raise", "nan", "damage"}
    for fault in report["faults"]:
        assert (fault["verdict"], fault["step"]) == ("valid", fault["fault"]["step"]), fault
    assert [check["verdict"] for check in report["checks"]] == ["valid"] * len(checkers.CHECKERS)


def test_seed_and_replay_command_come_first(done: tuple[Path, "subprocess.CompletedProcess[str]"]) -> None:
    """The first two lines are the seed, and the command that does the same again; then the plan, a fault a line."""
    _, process = done
    first, command, gap, *rest = process.stdout.splitlines()
    assert (first, gap) == ("seed 3, 3 faults; to do the same again:", "")
    assert command.startswith("elastic-mnist chaos --seed 3 --faults 3 --kinds damage,raise,nan --nproc 2 --nodes 1 ")
    assert "-- --train_samples=1000 " in command
    assert [line.split()[0] for line in rest[:3]] == ["1", "2", "3"]


def test_the_report_is_what_the_history_says(done: tuple[Path, "subprocess.CompletedProcess[str]"]) -> None:
    """Whoever reads the same files later comes to the same verdicts."""
    directory, _ = done
    told = read(directory)
    findings = [vars(check(told)) for check in checkers.CHECKERS]
    assert [finding for finding in findings if finding["name"] != "end"] == [
        check for check in report_of(directory)["checks"] if check["name"] != "end"
    ]


def read(directory: Path) -> history.History:
    """Read the history of both jobs in a directory."""
    plan = json.loads((directory / "disturbed" / "plan.json").read_text())
    return history.read(
        directory / "calm", directory / "disturbed", tuple(map(Fault.from_plain, plan)), Terms(patience=3)
    )


def judge(directory: Path, name: str) -> str:
    """Return a checker's verdict on what lies in a directory."""
    told = read(directory)
    return next(finding.verdict for check in checkers.CHECKERS if (finding := check(told)).name == name)


def test_what_is_spoilt_in_the_files_is_seen(
    done: tuple[Path, "subprocess.CompletedProcess[str]"], tmp_path: Path
) -> None:
    """A flipped byte in a snapshot, a line missing in a ledger, half a line in the log: each is `invalid`."""
    directory = tmp_path / "jobs"
    shutil.copytree(done[0], directory)
    snapshot = min((directory / "disturbed" / "snapshots").glob("step-*.pt"))
    ledger = directory / "disturbed" / "ledger" / "rank-00001.jsonl"
    log = directory / "disturbed" / "snapshots" / "events.jsonl"
    assert [judge(directory, name) for name in ("snapshots", "samples", "log")] == ["valid"] * 3

    data = bytearray(snapshot.read_bytes())
    data[len(data) // 2] ^= 1
    snapshot.write_bytes(data)
    assert judge(directory, "snapshots") == "invalid"

    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-1]))
    assert judge(directory, "samples") == "invalid"

    log.write_text(log.read_text() + '{"event": "run.st')
    assert judge(directory, "log") == "invalid"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--kinds=kill,flood",), ("--kinds flood", "choose from kill,")),
        (("--faults=0",), ("--faults 0", "at least 1")),
        (("--nodes=0",), ("--nodes 0", "at least 1")),
        (("--patience=nan",), ("--patience nan", "above 0")),
        (("--json=/missing/report.json",), ("--json /missing/report.json", "directory is missing")),
        (("--nodes=1", "--kinds=grow"), ("--kinds grow", "at most 1 nodes")),
        (("--", "--snapshot_path=mine"), ("--snapshot_path mine", "leave it out")),
        (("--", "--epoch=2"), ("--epoch", "--epochs")),
        (("--", "--gradient_sync=allreduce"), ("--gradient_sync allreduce", "use exact")),
        (("--kinds=kill", "--directory=."), ("--directory .", "not empty")),
    ],
)
def test_what_cannot_work_is_a_usage_error(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    """Exit status 2 and one line with the way out, before any job is started."""
    process = tool("--seed=1", *arguments)
    assert process.returncode == 2, process.stdout
    (line,) = process.stderr.splitlines()
    for word in ("elastic-mnist: error: ", *words):
        assert word in line


def test_a_training_that_is_refused_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the trainer refuses, here for want of data, comes through as its one line, with status 2."""
    monkeypatch.setenv("ELASTIC_MNIST_MIRRORS", "")
    monkeypatch.setenv("PATH", str(tmp_path))  # no npm
    process = tool(
        "--seed=1",
        "--kinds=kill",
        "--nproc=1",
        f"--directory={tmp_path / 'jobs'}",
        "--",
        f"--data_dir={tmp_path / 'none'}",
    )
    assert process.returncode == 2, process.stdout
    (line,) = process.stderr.splitlines()
    assert line.startswith(f"elastic-mnist: error: MNIST in {tmp_path / 'none'}: ")
    assert "use --dataset synthetic" in line


def test_a_job_that_is_overdue_is_ended(tmp_path: Path) -> None:
    """The injector ends it, notes so, and leaves no process behind."""
    options = ("--dataset=synthetic", "--epochs=100", "--hang_timeout=10")
    job = JobPlan(directory=tmp_path, options=options, num_processes=1, max_nodes=1, faults=(), seconds=0.5)
    injector.run(job, lambda _: None)
    told = history.read_job(tmp_path)
    assert told.noted("job.overdue")
    assert [note["status"] for note in told.noted("agent.ended")] == [-9]
    assert not leftovers.processes(tmp_path)
    assert checkers.check_end(history.History(faults=(), terms=Terms(), calm=told, disturbed=told)).verdict == "invalid"


def test_leftovers_are_found_and_killed(tmp_path: Path) -> None:
    """A process that a job's process has started, in a session of its own, is the job's; any other one is not."""
    sleep = "Popen(['sleep', '60'], stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)"
    script = f"from subprocess import DEVNULL, Popen; print({sleep}.pid)"
    environment = {**os.environ, leftovers.JOB_VARIABLE: str(tmp_path)}
    parent = [sys.executable, "-c", script]
    pid = int(subprocess.run(parent, env=environment, capture_output=True, text=True, check=True).stdout)
    assert leftovers.processes(tmp_path) == [pid]
    assert leftovers.processes(tmp_path / "other") == []
    leftovers.kill(tmp_path)
    eventually(lambda: not leftovers.processes(tmp_path), within=10)


def test_temporary_files_are_found(tmp_path: Path) -> None:
    """Hidden ones, too, at any depth."""
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / ".step-00000005.pt.0123.tmp").touch()
    (tmp_path / "snapshots" / "step-00000005.pt").touch()
    assert leftovers.temporary_files(tmp_path) == ["snapshots/.step-00000005.pt.0123.tmp"]


def test_a_mark_is_made_once(tmp_path: Path) -> None:
    """The first one stands, and whoever comes second is told so."""
    marks, fault = Marks(tmp_path / "plan.json"), Fault(kind="killall", step=5, ranks=(0, 1))
    assert marks.make(0, 0, step=5)
    assert not marks.make(0, 0, step=6)
    assert not marks.are_made(0, fault)
    assert marks.make(0, 1, step=5)
    assert marks.are_made(0, fault)
    assert [json.loads(path.read_text())["step"] for path in marks.directory.iterdir()] == [5, 5]


def test_the_users_own_sitecustomize_is_run_all_the_same(tmp_path: Path) -> None:
    """The one that stands in front of it hands on to it; without a plan it does nothing else."""
    (tmp_path / "sitecustomize.py").write_text("print('the user')\n")
    program = "import sys; print([type(finder).__name__ for finder in sys.meta_path if 'Planter' in repr(finder)])"
    for plan, expected in (({}, "[]"), ({"ELASTIC_MNIST_CHAOS_PLAN": "plan.json"}, "['_Planter']")):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PLANT), str(tmp_path)]), **plan}
        command = [sys.executable, "-c", program]
        told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert told.stdout.splitlines() == ["the user", expected]
        assert told.stderr == ""

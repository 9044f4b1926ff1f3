"""`elastic-mnist chaos` itself: a real job under a few faults, and what its parts do to real processes and files."""

import json
import os
import shutil
import signal
import subprocess
import sys
from math import inf
from pathlib import Path
from typing import Any

import pytest
from harness import eventually

from elastic_mnist.chaos import checkers, history, injector, leftovers
from elastic_mnist.chaos.history import Terms
from elastic_mnist.chaos.injector import JobPlan
from elastic_mnist.chaos.plan import Fault
from elastic_mnist.chaos.planted import Marks

PLANT = Path(injector.__file__).parent / "plant"

# 16 steps of real MNIST; seconds are given thrice, because other tests run beside.
COMMAND = (
    *("--seed=3", "--faults=3", "--kinds=damage,raise,nan", "--nproc=2", "--nodes=1", "--patience=3"),
    *("--", "--train_samples=1000", "--test_samples=100", "--epochs=1", "--save_every_steps=2"),
    *("--global_batch_size=64", "--micro_batch_size=32"),
)


# 60 steps of a few milliseconds; most of the time goes into the starts of workers.
SHORT = (
    *("--dataset=synthetic", "--train_samples=480", "--test_samples=60", "--epochs=1"),
    *("--global_batch_size=8", "--micro_batch_size=4", "--hang_timeout=4"),
)
# 100 steps, of which one waits half the hang timeout for the node that joins.
LONGER = (*SHORT, "--train_samples=800", "--hang_timeout=10")


def command(*arguments: object) -> list[str]:
    """Return the console command."""
    return [sys.executable, "-m", "elastic_mnist.cli.main", "chaos", *map(str, arguments)]


def tool(*arguments: object) -> "subprocess.CompletedProcess[str]":
    """Run the console command."""
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=280, check=False)


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


@pytest.mark.parametrize(
    ("seed", "kinds", "nodes", "training"),
    [
        (3, "kill,stop", ("--nodes=1", "--nproc=2"), SHORT),
        (3, "term,agent", ("--nodes=1", "--nproc=2"), SHORT),
        (3, "agentterm,killall", ("--nodes=1", "--nproc=2"), SHORT),
        (1, "grow,shrink", ("--nodes=2", "--nproc=1"), LONGER),
    ],
    ids=["kill and stop", "term and agent", "agentterm and killall", "grow and shrink"],
)
def test_a_handful_of_seeds(
    seed: int, kinds: str, nodes: tuple[str, ...], training: tuple[str, ...], tmp_path: Path
) -> None:
    """Of each, both faults fired, both and all else are valid, and the exit status is 0."""
    asked = (f"--seed={seed}", "--faults=2", f"--kinds={kinds}", *nodes, "--patience=3")
    process = tool("--directory", tmp_path / "jobs", "--json", tmp_path / "report.json", *asked, "--", *training)
    assert process.returncode == 0, process.stdout + process.stderr
    report = report_of(tmp_path / "jobs")
    assert [fault["fault"]["kind"] for fault in report["faults"]] == kinds.split(",")
    assert all(fault["step"] is not None for fault in report["faults"])
    verdicts = [found["verdict"] for found in (report, *report["faults"], *report["checks"])]
    assert verdicts == ["valid"] * (1 + 2 + len(checkers.CHECKERS))


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


@pytest.mark.parametrize(
    ("seconds", "still_seconds", "reason"),
    [(0.5, inf, "not finished within 0 s"), (inf, 0.5, "no new step within 0 s")],
    ids=["too long", "too still"],
)
def test_a_job_that_is_overdue_is_ended(seconds: float, still_seconds: float, reason: str, tmp_path: Path) -> None:
    """One that takes too long, or stands still: the injector ends it, notes so, and leaves no process behind."""
    job = JobPlan(
        directory=tmp_path,
        options=("--dataset=synthetic", "--epochs=100", "--hang_timeout=10"),
        num_processes=1,
        max_nodes=1,
        faults=(),
        seconds=seconds,
        still_seconds=still_seconds,
    )
    injector.run(job, lambda _: None)
    told = history.read_job(tmp_path)
    assert [note["reason"] for note in told.noted("job.overdue")] == [reason]
    assert [note["status"] for note in told.noted("agent.ended")] == [-9]
    assert not leftovers.processes(tmp_path)
    end = checkers.check_end(history.History(faults=(), terms=Terms(), calm=told, disturbed=told))
    assert (end.verdict, end.evidence) == ("invalid", reason)


def test_an_undisturbed_job_that_stands_still_is_told(tmp_path: Path) -> None:
    """It has a bound, too: `unknown` with the reason in one line, and status 3."""
    training = ("--dataset=synthetic", "--epochs=100", "--hang_timeout=1")
    asked = ("--seed=1", "--kinds=kill", "--nproc=1", "--patience=1e-9")  # so that only the hang timeout is left
    process = tool(*asked, f"--directory={tmp_path / 'jobs'}", "--", *training)
    assert process.returncode == 3, process.stdout + process.stderr
    (line,) = [line for line in process.stdout.splitlines() if "unknown" in line]
    assert "the undisturbed job did not finish (no new step within 1 s)" in line
    assert not leftovers.processes(tmp_path / "jobs" / "calm")


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGHUP])
def test_no_job_outlives_the_command(sign: signal.Signals, tmp_path: Path) -> None:
    """Asked to end, by a signal or with its terminal, it ends its job first."""
    job = tmp_path / "jobs" / "calm"
    asked = ("--seed=1", "--kinds=kill", f"--directory={tmp_path / 'jobs'}", "--", "--dataset=synthetic")
    with subprocess.Popen(command(*asked), stdout=subprocess.DEVNULL) as process:
        eventually(lambda: leftovers.processes(job), within=30)
        process.send_signal(sign)
        assert process.wait(60) == 128 + sign
    assert not leftovers.processes(job)


@pytest.mark.parametrize(
    ("kind", "status", "is_explained"),
    [
        ("agentterm", 143, True),
        ("agentterm", 1, False),
        ("agentterm", -11, False),
        ("term", 143, True),
        ("term", 1, False),
        ("agent", -9, True),
        ("agent", 143, False),
        ("kill", -9, False),
        ("kill", 143, False),
    ],
)
def test_a_fault_explains_one_end_with_one_status(kind: str, status: int, is_explained: bool, tmp_path: Path) -> None:
    """An agent that ends otherwise, or once more, ends by itself."""
    fault = Fault(kind=kind, step=5, ranks=(0,))
    job = JobPlan(
        directory=tmp_path, options=(), num_processes=1, max_nodes=1, faults=(fault,), seconds=9, still_seconds=9
    )
    supervisor = injector._Supervisor(job, lambda _: None)
    assert supervisor._cause(0, status) is None  # before the fault has fired
    Marks(tmp_path / "plan.json").make(0, 0, step=5)
    supervisor._look_at_marks()
    assert [supervisor._cause(0, status) for _ in range(2)] == [0 if is_explained else None, None]


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
    assert not leftovers.processes(tmp_path)


def test_a_process_that_cannot_be_killed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it for ever."""
    environment = {**os.environ, leftovers.JOB_VARIABLE: str(tmp_path)}
    with subprocess.Popen(["sleep", "60"], env=environment) as process:
        eventually(lambda: leftovers.processes(tmp_path), within=10)
        with monkeypatch.context() as patched:
            patched.setattr(os, "kill", lambda *_: None)
            assert leftovers.kill(tmp_path, within=0.1) == [process.pid]
        process.kill()


HOLDER = """
import mmap, os, sys
memory = os.memfd_create("elastic_mnist")
os.ftruncate(memory, 4096)
inode = os.fstat(memory).st_ino
if sys.argv[1] == "mapped":
    mapped = mmap.mmap(memory, 4096)
    os.closerange(3, 99)
print(inode, flush=True)
input()
"""


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_memory_is_found_while_a_process_holds_it(how: str) -> None:
    """Whosever that process is, and also where it has it mapped only; other memory is another job's."""
    holder = [sys.executable, "-c", HOLDER, how]
    with subprocess.Popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        inode = int(process.stdout.readline())
        assert leftovers.memory(process.pid) == ({inode} if how == "open" else set())
        assert leftovers.holders({inode}) == [f"held by process {process.pid}"]
        assert leftovers.holders({inode + 2**32}) == []
        process.kill()
    assert leftovers.holders({inode}) == []


def test_temporary_files_are_found(tmp_path: Path) -> None:
    """Hidden ones, too, at any depth; in TMPDIR all that torch is not known to leave."""
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / ".step-00000005.pt.0123.tmp").touch()
    (tmp_path / "snapshots" / "step-00000005.pt").touch()
    torchs = tmp_path / "tmp" / "torchelastic_0123" / "none_0123" / "attempt_0" / "1"
    torchs.mkdir(parents=True)
    (torchs / "error.json").touch()
    (torchs / "stdout.log").touch()
    (tmp_path / "tmp" / "torchinductor_root").mkdir()
    (tmp_path / "tmp" / "torch_4711").touch()
    assert leftovers.temporary_files(tmp_path) == [
        "snapshots/.step-00000005.pt.0123.tmp",
        "tmp/torch_4711",
        "tmp/torchelastic_0123/none_0123/attempt_0/1/stdout.log",
    ]


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

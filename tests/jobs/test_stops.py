"""A job that is asked to stop: one agreed step, a whole snapshot, exit 143, and a rerun that goes on from there."""

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Literal

import pytest
from harness import SMALL, TORCHRUN, Job, alive, eventually, fault, plain, standalone
from tiers import Fault, Plan

from elastic_mnist.cli import verify

OPTIONS = (
    *SMALL,
    "--dataset=synthetic",
    "--train_samples=2000",
    "--test_samples=600",
    "--epochs=2",
    "--save_every_steps=20",
)
STOPPED = 143


@pytest.fixture(scope="module")
def undisturbed_sha256(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of the small job when nobody stops it; one process, no torchrun."""
    directory = tmp_path_factory.mktemp("undisturbed")
    with Job(directory, directory, plain(), OPTIONS) as job:
        return str(job.finish()["weights_sha256"])


def check_stop(job: Job) -> int:
    """Check what a job that has stopped leaves; return the step at which it did."""
    (stopped,) = job.events("run.stopped")
    assert stopped["path"].endswith(f"step-{stopped['step']:08d}.pt")
    assert verify.run(stopped["path"], None) == 0
    assert not [event for event in job.events() if event["level"] == "error"]
    return int(stopped["step"])


def check_resumed(job: Job, step: int) -> None:
    """Check that a job has gone on from where it was stopped."""
    (resumed,) = job.events("run.resumed")
    assert (resumed["source"], resumed["step"], resumed["num_lost_steps"]) == ("storage", step, 0)


def waits_for_signals(pid: int) -> bool:
    """Whether a process has come as far as to wait for signals, instead of dying of them."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return bool(int(status.partition("SigBlk:")[2].split()[0], 16) & 1 << signal.SIGTERM - 1)


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
@pytest.mark.parametrize("to", ["worker", "plain"])
def test_a_signal_stops_the_job_at_an_agreed_step(
    sign: signal.Signals, to: str, tmp_path: Path, undisturbed_sha256: str
) -> None:
    """Sent to one worker of two, or to a process without a launcher: all is saved, and the rerun loses no step."""
    launcher = plain() if to == "plain" else standalone(2, max_restarts=0)
    with Job(tmp_path, tmp_path, launcher, OPTIONS) as job:
        reached = job.wait_for_step(5)
        target = job.process.pid if to == "plain" else job.worker(1).pid
        os.kill(target, sign)
        assert job.wait(within=20) == STOPPED
        step = check_stop(job)
        assert reached <= step
    with Job(tmp_path, tmp_path, launcher, OPTIONS) as job:
        assert job.finish()["weights_sha256"] == undisturbed_sha256
        check_resumed(job, step)


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_to_the_agent_or_to_the_group_stops_the_job(sign: signal.Signals, tmp_path: Path) -> None:
    """As a scheduler or a terminal sends it: the agent ends with 143 and one line, its workers in order."""
    for number, send in enumerate((os.kill, os.killpg)):
        with Job(tmp_path / str(number), tmp_path, standalone(2), OPTIONS) as job:
            job.wait_for_step(5)
            workers = job.workers()
            send(job.process.pid, sign)
            assert job.wait(within=20) == STOPPED
            check_stop(job)
            assert "Traceback" not in job.output
            assert job.output.count("elastic_mnist: stopped; the same command goes on from here\n") == 1
            assert not any(map(alive, workers))


def test_nohup_is_heeded(tmp_path: Path) -> None:
    """A job started to outlive its terminal does: SIGHUP to the whole group changes nothing."""
    with Job(tmp_path, tmp_path, ("nohup", *standalone(2, max_restarts=0)), OPTIONS) as job:
        job.wait_for_step(5)
        os.killpg(job.process.pid, signal.SIGHUP)
        assert job.finish()["num_restarts"] == 0


def test_a_signal_before_the_first_step_ends_at_once(tmp_path: Path) -> None:
    """In the middle of the imports there is nothing to save: 143, and no word of a failure."""
    with Job(tmp_path, tmp_path, plain(), OPTIONS, is_forked=False) as job:
        eventually(lambda: waits_for_signals(job.process.pid))
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(within=20) == STOPPED
        assert not [event for event in job.events() if event["level"] == "error"]


@pytest.mark.parametrize("moment", ["born", "in its imports"])
def test_a_signal_while_a_worker_is_replaced_loses_nothing(
    moment: str, tmp_path: Path, undisturbed_sha256: str
) -> None:
    """What is in memory only, because a worker was killed before any snapshot, is saved before the agent ends."""
    with Job(tmp_path, tmp_path, standalone(2), (*OPTIONS, "--save_every_steps=0")) as job:
        job.wait_for_step(6)
        killed = job.kill(1)

        def num_threads() -> list[int]:
            return sorted(worker.num_threads() for worker in job.workers() if worker.pid > killed.pid)

        def has_come() -> bool:
            """Each new worker is there; in its imports it has a thread that waits for signals."""
            return len(num_threads()) == 2 and (moment == "born" or num_threads()[0] > 1)

        eventually(has_come)
        assert not job.events("run.resumed")
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(within=29) == STOPPED
        assert check_stop(job) >= 6
    with Job(tmp_path, tmp_path, standalone(2), OPTIONS) as job:
        assert job.finish()["weights_sha256"] == undisturbed_sha256
        (resumed,) = job.events("run.resumed")
        assert resumed["source"] == "storage"
        assert resumed["step"] >= 6


STOPPED_WHILE_IT_STARTS_WORKERS = """
import os, pathlib, signal
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.run import main

popen, number = SubprocessHandler._popen, 0

def stopped_popen(self, *arguments, **keywords):
    global number
    process, number = popen(self, *arguments, **keywords), number + 1
    if number == 3:  # the first of two in the second generation
        pathlib.Path("fired").touch()
        os.kill(os.getpid(), signal.SIGTERM)
    return process

SubprocessHandler._popen = stopped_popen
main()
"""


def test_a_signal_while_the_agent_starts_its_workers_loses_nothing(tmp_path: Path) -> None:
    """Between one worker's start and the next one's it waits; then all of them are asked to stop, and save."""
    (tmp_path / "stopped.py").write_text(STOPPED_WHILE_IT_STARTS_WORKERS)
    launcher = (sys.executable, "stopped.py", *standalone(2)[len(TORCHRUN) :])
    with Job(tmp_path, tmp_path, launcher, (*OPTIONS, "--save_every_steps=0")) as job:
        job.wait_for_step(6)
        job.kill(1)
        assert job.wait(within=40) == STOPPED
        assert (tmp_path / "fired").exists()
        assert check_stop(job) >= 6


def test_an_agent_that_waits_while_it_starts_its_workers_is_not_deaf(tmp_path: Path) -> None:
    """Asked to stop while the start of its workers takes for ever, it does soon."""
    text = STOPPED_WHILE_IT_STARTS_WORKERS.replace("return process", "import time; time.sleep(600); return process")
    (tmp_path / "stopped.py").write_text(text.replace("number == 3", "number == 1"))
    with Job(tmp_path, tmp_path, (sys.executable, "stopped.py", *standalone(2)[len(TORCHRUN) :]), OPTIONS) as job:
        eventually((tmp_path / "fired").exists)
        assert job.wait(within=15) == STOPPED


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    """Pressed again a while later, it ends a process that does not come to the end of its step."""
    environment, fired = fault(tmp_path, "spin", rank=0, step=3)
    with Job(tmp_path, tmp_path, plain(), OPTIONS, environment) as job:
        eventually(fired.exists)
        began = time.monotonic()

        def interrupted() -> bool:
            job.process.send_signal(signal.SIGINT)
            return job.process.poll() is not None

        eventually(interrupted, within=20)
        assert job.wait() == 130
        assert time.monotonic() - began > 3  # one Ctrl-C arrives twice, within moments: from the terminal and torchrun
        assert not job.events("run.failed")


NUM_JOBS = 5
MOMENTS = ("training", "saving", "evaluation", "training", "saving", "saving")
"""At which a job is stopped and started again, one after the other."""


def held(directory: Path, moment: str, *, rank: int, step: int) -> Plan:
    """Return a plan that holds a job until it is asked to stop: in mid-write of a snapshot, or in an evaluation."""
    place: Literal["write", "evaluation"] = "write" if moment == "saving" else "evaluation"
    return Plan(directory, Fault(kind="hold", place=place, ranks=(rank,), step=step, generation=None))


def ask_both(job: Job) -> None:
    """Send SIGTERM to rank 0, and 200 ms later to rank 1, if it is still there."""
    workers = [job.worker(rank) for rank in (0, 1)]
    workers[0].send_signal(signal.SIGTERM)
    time.sleep(0.2)
    if alive(workers[1]):
        workers[1].send_signal(signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thirty_stops(tmp_path: Path, undisturbed_sha256: str) -> None:
    """SIGTERM to rank 0 and 200 ms later to rank 1, at 30 moments of training, evaluation and saving, each resumed.

    One agreed step, a whole snapshot and exit 143 each time; never is a worker killed.
    """
    seed = int(os.environ.get("ELASTIC_MNIST_TEST_SEED", str(random.SystemRandom().randrange(10**6))))
    print(f"seed {seed}")
    choose = random.Random(seed)  # noqa: S311 - repeatable, not secret
    launcher = standalone(2, max_restarts=0)
    for number in range(NUM_JOBS):
        directory, step = tmp_path / str(number), 0
        for generation, moment in enumerate(MOMENTS):
            target = 32 if moment == "evaluation" else step + choose.randrange(1, 6)
            rank = choose.randrange(2) if moment == "evaluation" else 0  # which alone saves
            plan = None
            if moment != "training":
                plan = held(directory / f"plan-{generation}", moment, rank=rank, step=target)
            options = (*OPTIONS, f"--save_every_steps={target if moment == 'saving' else 1}")
            with Job(directory, tmp_path, launcher, options, plan.environment if plan else None) as job:
                if plan is None:
                    job.wait_for_step(target, generation=generation)
                    time.sleep(choose.random() * 0.1)
                else:
                    plan.wait()
                    assert [what for what, *_ in plan.fired()] == ["begins"]
                ask_both(job)
                assert job.wait(within=25) == STOPPED, job.output
                assert "SIGKILL" not in job.output
                assert "exitcode: -9" not in job.output
                if step > 0:
                    check_resumed(job, step)
                assert plan is None or [what for what, *_ in plan.fired()] == ["begins", "ended"]
                step = check_stop(job)
                assert step >= target
                print(f"job {number}: stopped in {moment}, at step {step}")
        with Job(directory, tmp_path, launcher, OPTIONS) as job:
            assert job.finish()["weights_sha256"] == undisturbed_sha256
            check_resumed(job, step)

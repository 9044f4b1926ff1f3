"""What befalls the agents of a job of two nodes: one ends or comes back, whichever it is; what is left, and told of it.

The longer ones are in `test_agents_long.py`.
"""

import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from harness import Job, eventually, fault, free_port, torchrun
from nodes import (
    END_SECONDS,
    GO_ON_SECONDS,
    PACED,
    TOGETHER,
    TOGETHER_SECONDS,
    finish,
    node,
    undisturbed,
    wait_for_world,
)

from elastic_mnist.chaos import leftovers

STOPPED = 143
STATUS = {signal.SIGINT: STOPPED, signal.SIGTERM: STOPPED, signal.SIGKILL: -signal.SIGKILL}


def slow(*values: object) -> Any:  # noqa: ANN401 - what pytest makes of them is private
    """Return parameters that take part only in the long tests."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def undisturbed_sha256(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights when one process does it all."""
    return undisturbed(tmp_path_factory.mktemp("undisturbed"))


def at(port: int) -> str:
    """Return torchrun's option for the README's line."""
    return f"--master_port={port}"


def errors(job: Job) -> list[str]:
    """Return what a node has said of its end."""
    return [line for line in job.output.splitlines() if line.startswith("elastic_mnist: error: ")]


@pytest.mark.slow  # `test_nodes.py` has the half of it
def test_the_second_agent_comes_and_goes(tmp_path: Path, undisturbed_sha256: str) -> None:
    """It is interrupted, comes back and is killed: the first goes on alone, and each change costs at most a step."""
    port = free_port()
    with node(tmp_path, at(port)) as first:
        generation = wait_for_world(first, 1, after=-1, within=90)
        for sign in (signal.SIGINT, signal.SIGKILL):
            with node(tmp_path, at(port)) as second:
                generation = wait_for_world(first, 2, after=generation, within=90)
                second.process.send_signal(sign)
                assert second.wait(within=END_SECONDS) == STATUS[sign]
            generation = wait_for_world(first, 1, after=generation, within=GO_ON_SECONDS)
        resumes = first.events("run.resumed")
        assert [event["world_size"] for event in resumes] == [2, 1] * 2
        for resumed in resumes:
            assert resumed["source"] == "memory"
            assert resumed["num_lost_steps"] <= 1
        first.kill_all()
    assert finish(tmp_path) == undisturbed_sha256


@pytest.mark.parametrize("sign", [signal.SIGKILL, slow(signal.SIGTERM), slow(signal.SIGINT)])
def test_the_second_agent_ends_with_the_first(sign: signal.Signals, tmp_path: Path, undisturbed_sha256: str) -> None:
    """Where the node ends that hosts the rendezvous, the other one says so in a line, and the rerun has lost no step.

    What was finished is in the other node's memory alone then, and that one's agent saves it.
    """
    port = free_port()
    with node(tmp_path, at(port)) as first:
        wait_for_world(first, 1, after=-1, within=90)
        with node(tmp_path, at(port)) as second:
            wait_for_world(first, 2, after=0, within=90)
            first.process.send_signal(sign)
            assert second.wait(within=END_SECONDS) == 1
            assert first.wait(within=END_SECONDS) == STATUS[sign]
            assert "Traceback" not in second.output
            (line,) = errors(second)
            assert f"the rendezvous at 127.0.0.1:{port} is gone" in line
            assert "start the job again" in line
    saved = max(int(path.stem.removeprefix("step-")) for path in (tmp_path / "snapshots").glob("step-*.json"))
    with node(tmp_path, at(port)) as again:  # on the same port
        wait_for_world(again, 1, after=1, within=90)
        (resumed,) = again.events("run.resumed")
        assert (resumed["source"], resumed["step"]) == ("storage", saved)
        assert resumed["num_lost_steps"] <= 1
        again.kill_all()
    assert finish(tmp_path) == undisturbed_sha256


def test_with_the_rendezvous_in_a_file_any_node_may_end(tmp_path: Path, undisturbed_sha256: str) -> None:
    """The first agent is killed, the second goes on alone, a third joins, and the second is killed."""
    rendezvous = ("--rdzv_backend=c10d", "--rdzv_conf=store_type=file", f"--rdzv_endpoint={tmp_path}/rendezvous")
    with node(tmp_path, *rendezvous) as first:
        wait_for_world(first, 1, after=-1, within=90)
        with node(tmp_path, *rendezvous) as second:
            wait_for_world(first, 2, after=0, within=90)
            first.kill_all()
            wait_for_world(second, 1, after=1, within=GO_ON_SECONDS)
            with node(tmp_path, *rendezvous) as third:
                wait_for_world(second, 2, after=2, within=90)
                second.kill_all()
                wait_for_world(third, 1, after=3, within=GO_ON_SECONDS)
                losses = [event["num_lost_steps"] for event in first.events("run.resumed")]
                assert len(losses) == 4
                assert max(losses) <= 1
                third.kill_all()
    assert finish(tmp_path) == undisturbed_sha256


def test_a_file_without_a_directory_is_told(tmp_path: Path) -> None:
    """A rendezvous' file that cannot be made is named at once, in one line."""
    missing = tmp_path / "missing" / "rendezvous"
    with node(tmp_path, "--rdzv_backend=c10d", "--rdzv_conf=store_type=file", f"--rdzv_endpoint={missing}") as job:
        assert job.wait(within=30) == 2
        (line,) = errors(job)
        assert f"--rdzv_endpoint {missing}" in line
        assert "Traceback" not in job.output


@pytest.fixture(scope="module")
def failed_node(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, bool]:
    """A node without restarts whose worker has raised; and whether the other node has gone on alone."""
    directory, port = tmp_path_factory.mktemp("failed"), free_port()
    planted, fired = fault(directory / "planted", "raise", rank=1, step=3)
    with node(directory, at(port), TOGETHER, address="127.0.0.1") as first:
        eventually(lambda: "elastic rendezvous" in first.output)  # it hosts the rendezvous
        with node(directory, at(port), TOGETHER, address="127.0.0.2", max_restarts=0, environment=planted) as second:
            second.wait()
            assert fired.read_text() == "1 3 0"
        try:
            wait_for_world(first, 1, after=0, within=GO_ON_SECONDS + TOGETHER_SECONDS)
            goes_on = True
        except AssertionError:
            goes_on = False
        first.kill_all()
    return second, goes_on


def test_a_node_that_fails_for_good_leaves_the_others_at_work(
    failed_node: tuple[Job, bool], undisturbed_sha256: str
) -> None:
    """A node whose restarts are spent ends as a failure; the other one goes on alone, to the undisturbed weights."""
    second, goes_on = failed_node
    assert second.process.returncode == 1
    assert goes_on
    assert finish(second.directory) == undisturbed_sha256


def test_the_root_cause_is_told_once_with_rank_and_step(failed_node: tuple[Job, bool]) -> None:
    """Of two nodes, the event log names the one that raised, once; and so does its launcher's report."""
    second, _ = failed_node
    (failed,) = second.events("run.failed")
    assert (failed["rank"], failed["step"], failed["generation"]) == (1, 3, 0)
    assert failed["reason"] == "RuntimeError: a planted fault"
    report = second.output.partition("elastic_mnist FAILED\n")[2]
    assert re.findall(r"rank +: (\d+)", report) == ["1"]
    assert report.count("RuntimeError: a planted fault") == 1


@pytest.mark.parametrize(
    ("options", "sign", "status"),
    [
        (("--lr=1e30",), None, 1),
        # A write that it cuts off would leave a draft, which the next start clears.
        (("--epochs=1000", "--save_every=0", "--save_every_steps=0"), signal.SIGKILL, -signal.SIGKILL),
        slow(("--epochs=1000",), signal.SIGTERM, STOPPED),
        slow((), None, 0),
    ],
    ids=["failure", "KILL of the agent", "TERM of the agent", "good end"],
)
def test_nothing_is_left_behind(
    options: tuple[str, ...], sign: signal.Signals | None, status: int, tmp_path: Path
) -> None:
    """However an agent ends, soon no process of it is left, no memory, no temporary file, and its port is free."""
    port, tmpdir = free_port(), tmp_path / leftovers.TMPDIR
    tmpdir.mkdir()
    launcher = torchrun("--nnodes=1:2", f"--master_port={port}", "--nproc_per_node=2", "--max_restarts=0")
    environment = {"TMPDIR": str(tmpdir), leftovers.JOB_VARIABLE: str(tmp_path)}
    with Job(
        tmp_path, tmp_path, launcher, (*PACED, "--train_samples=40", *options), environment, is_forked=False
    ) as job:
        eventually(lambda: len(leftovers.memory(job.process.pid)) == 2, what="the memory tier, and the signs of life")
        memory = leftovers.memory(job.process.pid)
        if sign is not None:
            job.wait_for_step(3)
            assert len(leftovers.processes(tmp_path)) == 1 + 2
            assert f"held by process {job.worker(0).pid}" in leftovers.holders(memory)
            job.process.send_signal(sign)
        assert job.wait(within=60) == status
        eventually(lambda: not leftovers.processes(tmp_path), within=30)
        eventually(lambda: not leftovers.holders(memory), within=5)  # a process that dies has no environment any more
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the next job does
            again.bind(("127.0.0.1", port))
        assert not leftovers.temporary_files(tmp_path)

"""Nodes come and go: two real agents on one host, one worker each."""

import signal
from pathlib import Path

import pytest
from harness import LONG, Job, agent, eventually, free_port, plain

from elastic_mnist.cli import audit


@pytest.fixture(scope="module")
def undisturbed_sha256(mnist_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights when one process does it all."""
    with Job(tmp_path_factory.mktemp("undisturbed"), mnist_dir, plain(), LONG) as job:
        return str(job.finish()["weights_sha256"])


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
def test_join_and_leave_in_mid_epoch(
    sign: signal.Signals, mnist_dir: Path, tmp_path: Path, undisturbed_sha256: str
) -> None:
    """A second agent joins the running job and leaves it; each time the job loses no more than a step, and says why."""
    port = free_port()
    with agent(tmp_path, mnist_dir, port) as first:
        first.wait_for_step(7)
        with agent(tmp_path, mnist_dir, port) as second:
            # On a busy machine the first one may begin anew more than once before the other takes part.
            eventually(lambda: any(event["world_size"] == 2 for event in first.events("run.started")))
            generation, step = first.progress()
            first.wait_for_step(step + 1, generation=generation)
            second.process.send_signal(sign)
            second.wait()
        finished = first.finish()
        assert any(event["reason"].endswith("while a node waits to join") for event in first.events("run.stopped"))
        sizes = [event["world_size"] for event in first.events("run.started")]
        assert (sizes[0], max(sizes), sizes[-1]) == (1, 2, 1)
        resumes = first.events("run.resumed")
        assert len(resumes) >= 2
        for resumed in resumes:
            assert resumed["source"] == "memory"
            assert resumed["num_lost_steps"] <= 1
        assert finished["step"] == 125
        assert [event["epoch"] for event in first.events("epoch.finished")] == [1]
        assert finished["weights_sha256"] == undisturbed_sha256
    assert audit.run(tmp_path / "ledger", event_log=None, run_id=None) == 0


def test_leave_and_come_back_in_mid_epoch(mnist_dir: Path, tmp_path: Path, undisturbed_sha256: str) -> None:
    """Two agents, one of which is killed and later replaced, 2 to 1 to 2: the same weights, each sample once."""
    port = free_port()
    with agent(tmp_path, mnist_dir, port) as first:
        # The one that hosts the rendezvous is not the one to be killed.
        eventually(lambda: "elastic rendezvous" in first.output)
        with agent(tmp_path, mnist_dir, port) as second:
            eventually(lambda: any(event["world_size"] == 2 for event in first.events("run.started")))
            generation = first.progress()[0]
            first.wait_for_step(8, generation=generation)
            second.kill_all()
        first.wait_for_step(20, generation=generation + 1)
        with agent(tmp_path, mnist_dir, port) as third:
            finished = first.finish()
            assert third.wait() == 0, third.output
        worlds = [event["world_size"] for event in first.events("run.started")]
        assert worlds[-3:] == [2, 1, 2]
        assert finished["weights_sha256"] == undisturbed_sha256
    assert audit.run(tmp_path / "ledger", event_log=None, run_id=None) == 0

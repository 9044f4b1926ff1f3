"""Nodes come and go: two real agents on one host, one worker each."""

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from harness import Job, eventually, free_port, plain, torchrun

from elastic_mnist.tools import audit

# Long enough that a node can join and leave in mid-epoch; one epoch, a snapshot every 5 steps.
OPTIONS = (
    "--train_samples=12000",
    "--test_samples=300",
    "--global_batch_size=96",
    "--micro_batch_size=32",
    "--epochs=1",
    "--save_every_steps=5",
    "--sample_log=ledger",
)


@pytest.fixture(scope="module")
def undisturbed_sha256(mnist_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights when one process does it all."""
    with Job(tmp_path_factory.mktemp("undisturbed"), mnist_dir, plain(), OPTIONS) as job:
        return str(job.finish()["weights_sha256"])


def agent(
    directory: Path, data_dir: Path, port: int, *, address: str = "127.0.0.1", options: Sequence[str] = ()
) -> Job:
    """Start an agent with the README's line for several nodes, here all on one host."""
    line = ("--max_restarts=3", "--nnodes=1:2", "--master_addr=127.0.0.1", f"--master_port={port}")
    return Job(directory, data_dir, torchrun(*line, f"--local_addr={address}"), (*OPTIONS, *options))


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
def test_join_and_leave_in_mid_epoch(
    sign: signal.Signals, mnist_dir: Path, tmp_path: Path, undisturbed_sha256: str
) -> None:
    """A second agent joins the running job and leaves it; each time the job goes on from its newest snapshot."""
    port = free_port()
    with agent(tmp_path, mnist_dir, port) as first:
        first.wait_for_step(7)
        with agent(tmp_path, mnist_dir, port) as second:
            first.wait_for_step(6, generation=1)
            second.process.send_signal(sign)
            second.wait()
        finished = first.finish()
        starts = first.events("run.started")
        assert [event["world_size"] for event in starts[:2]] == [1, 2]
        assert starts[-1]["world_size"] == 1
        resumes = first.events("run.resumed")
        saved = {event["step"] for event in first.events("snapshot.saved")}
        for resumed in resumes:
            assert resumed["source"] == "storage"
            assert resumed["step"] in saved
            assert resumed["num_lost_steps"] < 5
        assert finished["step"] == 125
        assert [event["epoch"] for event in first.events("epoch.finished")] == [1]
        assert finished["weights_sha256"] == undisturbed_sha256
    assert audit.run(tmp_path / "ledger", event_log=None, run_id=None) == 0


def test_leave_and_come_back_in_mid_epoch(mnist_dir: Path, tmp_path: Path, undisturbed_sha256: str) -> None:
    """Two agents, one of which is killed and later replaced, 2 to 1 to 2: the same weights, each sample once."""
    port = free_port()
    with agent(tmp_path, mnist_dir, port) as first:
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


def test_only_rank_0_writes(mnist_dir: Path, tmp_path: Path) -> None:
    """A second agent with a snapshot path of its own writes nothing there, and says that it does not see the run's."""
    port = free_port()
    with agent(tmp_path / "first", mnist_dir, port) as first:
        first.wait_for_step(3)
        with agent(tmp_path / "second", mnist_dir, port) as second:
            eventually(lambda: any(event["world_size"] == 2 for event in first.events("run.started")))
            assert first.wait() == 0, first.output
            assert second.wait() == 0, second.output
        assert {event["event"] for event in second.events()} == {"world.snapshots_not_shared"}
        assert [path.name for path in (tmp_path / "second" / "snapshots").iterdir()] == ["events.jsonl"]
        assert "joined as node 2 of 2" in second.output


@pytest.mark.parametrize(("first_address", "second_address"), [("127.0.0.1", "127.0.0.2"), ("127.0.0.2", "127.0.0.1")])
def test_newcomer_does_not_take_over(
    first_address: str, second_address: str, mnist_dir: Path, tmp_path: Path, undisturbed_sha256: str
) -> None:
    """A node that joins goes on from where the running job is, also where torchrun's order would make it rank 0."""
    port = free_port()
    with agent(tmp_path / "first", mnist_dir, port, address=first_address) as first:
        first.wait_for_step(7)
        with agent(tmp_path / "second", mnist_dir, port, address=second_address) as second:
            finished = first.finish()
            assert second.wait() == 0, second.output
        (resumed,) = first.events("run.resumed")
        assert resumed["step"] >= 5
        assert resumed["world_size"] == 2
        assert finished["weights_sha256"] == undisturbed_sha256


def test_node_with_other_options_is_refused(mnist_dir: Path, tmp_path: Path) -> None:
    """An agent that joins with another seed is turned away by name, and the job it came to goes on and finishes."""
    port = free_port()
    with agent(tmp_path / "first", mnist_dir, port, address="127.0.0.2") as first:
        first.wait_for_step(3)
        # By its address it would be rank 0, and turn the others away.
        with agent(tmp_path / "second", mnist_dir, port, address="127.0.0.1", options=["--seed=9"]) as stranger:
            assert stranger.wait() == 2
            assert "seed is 9 here and 0 at rank 0" in stranger.output
        first.finish()

"""A node that joins a running job: what it may not take over, write or spoil. Two real agents on one host."""

from pathlib import Path

import pytest
from harness import LONG, Job, agent, eventually, free_port, plain


@pytest.fixture(scope="module")
def undisturbed_sha256(mnist_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights when one process does it all."""
    with Job(tmp_path_factory.mktemp("undisturbed"), mnist_dir, plain(), LONG) as job:
        return str(job.finish()["weights_sha256"])


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


def test_newcomer_does_not_take_over(mnist_dir: Path, tmp_path: Path, undisturbed_sha256: str) -> None:
    """A node that joins goes on from where the running job is, and says so, also where torchrun calls it the first."""
    port = free_port()
    with agent(tmp_path / "first", mnist_dir, port, address="127.0.0.2") as first:
        first.wait_for_step(7)
        with agent(tmp_path / "second", mnist_dir, port, address="127.0.0.1") as second:
            finished = first.finish()
            assert second.wait() == 0, second.output
        (resumed,) = first.events("run.resumed")
        assert resumed["step"] >= 5
        assert resumed["world_size"] == 2
        assert second.output.count(f"elastic_mnist: one of 2 nodes in the job at 127.0.0.1:{port};") == 1, second.output
        assert "one of 2 nodes" not in first.output
        assert finished["weights_sha256"] == undisturbed_sha256


def test_node_with_other_options_is_refused(mnist_dir: Path, tmp_path: Path) -> None:
    """An agent that comes with another seed is turned away by name, and the job that runs there does not notice."""
    port = free_port()
    with agent(tmp_path / "first", mnist_dir, port, address="127.0.0.2") as first:
        first.wait_for_step(3)
        # By its address it would be rank 0, and turn the others away.
        with agent(tmp_path / "second", mnist_dir, port, address="127.0.0.1", options=["--seed=9"]) as stranger:
            assert stranger.wait() == 2
            assert "seed is 9 here and 0 there" in stranger.output
            assert "--master_port" in stranger.output
        assert first.finish()["num_restarts"] == 0

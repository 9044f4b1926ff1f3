"""More of what befalls nodes, a minute or more each: comes and goes many times, stands still as leader, alone, as host.

scripts/test -m slow tests/test_agents_long.py tests/test_agents.py tests/test_network.py
"""

import signal
from pathlib import Path

import pytest
from harness import eventually, free_port
from nodes import (
    END_SECONDS,
    GO_ON_SECONDS,
    HANG_SECONDS,
    TOGETHER,
    TOGETHER_SECONDS,
    Place,
    check_one_writer,
    finish,
    node,
    stop,
    undisturbed,
    wait_for_world,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def undisturbed_sha256(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights when one process does it all."""
    return undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.timeout(600)
def test_a_node_comes_late_and_five_times(tmp_path: Path, undisturbed_sha256: str) -> None:
    """Half a minute late, it ends by any signal and is replaced, four times: each change costs at most a step."""
    rendezvous = f"--master_port={free_port()}"
    with node(tmp_path, rendezvous, max_restarts=5) as first:
        generation = wait_for_world(first, 1, after=-1, within=90)
        first.wait_for_step(40)
        for sign in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGTERM):
            with node(tmp_path, rendezvous) as second:
                generation = wait_for_world(first, 2, after=generation, within=90)
                second.process.send_signal(sign)
                assert second.wait(within=END_SECONDS) == (143 if sign != signal.SIGKILL else -sign)
            generation = wait_for_world(first, 1, after=generation, within=GO_ON_SECONDS)
        resumes = first.events("run.resumed")
        assert [event["world_size"] for event in resumes] == [2, 1] * 5
        assert max(event["num_lost_steps"] for event in resumes) <= 1
        first.kill_all()
    assert finish(tmp_path) == undisturbed_sha256


def test_a_stopped_node_comes_back(tmp_path: Path, undisturbed_sha256: str) -> None:
    """Agent and worker of a node stand still: the other goes on alone; they run again, join, and undo nothing."""
    rendezvous = f"--master_port={free_port()}"
    place = Place(tmp_path)
    with node(tmp_path, rendezvous) as first:
        wait_for_world(first, 1, after=-1, within=90)
        with node(tmp_path, rendezvous) as second:
            wait_for_world(first, 2, after=0, within=90)
            stopped = stop(second)
            wait_for_world(first, 1, after=1, within=HANG_SECONDS + GO_ON_SECONDS, meanwhile=place.look)
            for process in stopped:
                process.resume()
            wait_for_world(first, 2, after=2, within=90, meanwhile=place.look)
            (hung,) = first.events("peer.hung")
            assert hung["reason"].startswith("rank 1 has given no sign of life for")
            check_one_writer(first)
            first.kill_all()
    assert finish(tmp_path) == undisturbed_sha256


def test_a_stopped_leader_comes_back_as_a_follower(tmp_path: Path, undisturbed_sha256: str) -> None:
    """The node of rank 0 stands still: the other takes over; when it runs again it joins, and undoes nothing."""
    rendezvous = (f"--master_port={free_port()}", TOGETHER)
    place = Place(tmp_path)
    with node(tmp_path, *rendezvous, address="127.0.0.2") as first:
        eventually(lambda: "elastic rendezvous" in first.output)  # it hosts the rendezvous
        with node(tmp_path, *rendezvous, address="127.0.0.1") as leader:
            wait_for_world(first, 2, after=-1, within=90)
            assert leader.worker(0)
            stopped = stop(leader)
            within = HANG_SECONDS + TOGETHER_SECONDS + GO_ON_SECONDS
            wait_for_world(first, 1, after=0, within=within, meanwhile=place.look)
            for process in stopped:
                process.resume()
            wait_for_world(first, 2, after=1, within=90, meanwhile=place.look)
            begun = [line for line in first.output.splitlines() if '"event": "run.started"' in line]
            assert '"generation": 2' in begun[-1]  # the one that has served without a break leads now
            check_one_writer(first)
            assert max(event["num_lost_steps"] for event in first.events("run.resumed")) <= 1
            first.kill_all()
    assert finish(tmp_path) == undisturbed_sha256


def test_a_stopped_worker_of_one_node_is_replaced(tmp_path: Path, undisturbed_sha256: str) -> None:
    """Its own agent tells of it and kills it, and the job goes on with both nodes."""
    rendezvous = f"--master_port={free_port()}"
    with node(tmp_path, rendezvous) as first:
        wait_for_world(first, 1, after=-1, within=90)
        with node(tmp_path, rendezvous) as second:
            wait_for_world(first, 2, after=0, within=90)
            (worker,) = second.workers()
            worker.send_signal(signal.SIGSTOP)
            generation = wait_for_world(first, 2, after=1, within=HANG_SECONDS + GO_ON_SECONDS)
            assert generation == 2
            (hung,) = first.events("worker.hung")
            assert (hung["pid"], hung["condition"], hung["generation"]) == (worker.pid, "stopped", 1)
            assert not worker.is_running()
            assert max(event["num_lost_steps"] for event in first.events("run.resumed")) <= 1
            first.kill_all()
    assert finish(tmp_path) == undisturbed_sha256


def test_a_node_does_not_wait_for_ever_for_a_stopped_rendezvous(tmp_path: Path, undisturbed_sha256: str) -> None:
    """The node that hosts the rendezvous stands still: the other ends, saying why; when it runs again, it goes on."""
    rendezvous = f"--master_port={free_port()}"
    with node(tmp_path, rendezvous) as first:
        wait_for_world(first, 1, after=-1, within=90)
        with node(tmp_path, rendezvous, "--rdzv_conf=read_timeout=10") as second:
            wait_for_world(first, 2, after=0, within=90)
            stopped = stop(first)
            assert second.wait(within=10 + END_SECONDS) == 1
            assert second.output.count("elastic_mnist: error: the rendezvous at ") == 1
        for process in stopped:
            process.resume()
        wait_for_world(first, 1, after=1, within=GO_ON_SECONDS)
        check_one_writer(first)
        first.kill_all()
    assert finish(tmp_path) == undisturbed_sha256

"""What the two tiers of snapshots stand in the long run, and when a whole node falls silent or all are lost.

A command of its own, about four minutes on two cores:

    scripts/test -m slow tests/test_tiers_long.py tests/test_tiers.py
"""

import resource
import signal
from pathlib import Path

import psutil
import pytest
from harness import Event, Job, eventually, standalone
from tiers import ONE_EPOCH, SHORT, Fault, Plan, RendezvousStore, undisturbed

from elastic_mnist.cli import audit
from elastic_mnist.snapshots.durable import DurableTier
from elastic_mnist.snapshots.storage import LocalStorage

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def one_epoch_sha256(mnist_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of the job of one epoch when nobody touches it."""
    return str(undisturbed(tmp_path_factory.mktemp("undisturbed"), mnist_dir, ONE_EPOCH)["weights_sha256"])


def test_all_nodes_are_lost(mnist_dir: Path, tmp_path: Path, one_epoch_sha256: str) -> None:
    """With both nodes killed at once the memory is gone: the same command goes on from the newest durable snapshot."""
    until_second = Fault(kind="hold", place="step", ranks=(0,), step=4)
    at_the_end = Fault(kind="hold", place="step", ranks=(0,), step=13, generation=None)
    plan = Plan(tmp_path / "faults", until_second, at_the_end)
    places = tmp_path / "job"
    with RendezvousStore() as store, store.agent(places, mnist_dir, ONE_EPOCH, plan.environment) as first:
        plan.wait(0)
        with store.agent(places, mnist_dir, ONE_EPOCH, plan.environment) as second:
            plan.wait(1)
            eventually(lambda: [event for event in first.events("snapshot.saved") if event["step"] == 10])
            second.kill_all()
            first.kill_all()
    with RendezvousStore() as store, store.agent(places, mnist_dir, ONE_EPOCH) as again:
        finished = again.finish()
        (resumed,) = again.events("run.resumed")
    assert (resumed["source"], resumed["step"], resumed["num_lost_steps"]) == ("storage", 10, 3)
    assert finished["weights_sha256"] == one_epoch_sha256
    assert audit.run(tmp_path / "ledger", event_log=places / "snapshots" / "events.jsonl", run_id=None) == 0


def test_a_node_falls_silent_in_the_middle_of_a_write(mnist_dir: Path, tmp_path: Path, one_epoch_sha256: str) -> None:
    """Rank 0's node is stopped half-way in a durable snapshot, the other one goes on, and the first one wakes up.

    From then on no snapshot of the generation that is over is saved, and the steps saved never go back.
    """
    until_second = Fault(kind="hold", place="step", ranks=(0,), step=4)
    in_a_write = Fault(kind="stop", place="write", ranks=(0,), step=10, generation=1)
    until_awake = Fault(kind="hold", place="step", ranks=(0,), step=16, generation=None)
    plan = Plan(tmp_path / "faults", until_second, in_a_write, until_awake)
    options = (*ONE_EPOCH, "--hang_timeout=10")
    places = tmp_path / "job"
    with RendezvousStore() as store, store.agent(places, mnist_dir, options, plan.environment) as first:
        plan.wait(0)
        with store.agent(places, mnist_dir, options, plan.environment) as second:
            plan.wait(1)
            worker, first_agent = first.worker(0), psutil.Process(first.process.pid)
            eventually(lambda: worker.status() == psutil.STATUS_STOPPED)
            first_agent.send_signal(signal.SIGSTOP)
            plan.wait(2)
            (resumed, *_) = [event for event in second.events("run.resumed") if event["generation"] > 1]
            assert (resumed["source"], resumed["world_size"]) == ("memory", 1)
            assert resumed["step"] >= 10
            first_agent.send_signal(signal.SIGCONT)
            worker.send_signal(signal.SIGCONT)
            eventually(lambda: not worker.is_running(), what="the end of the worker of the generation that is over")
            plan.let_go(2)
            finished = eventually(lambda: second.events("run.finished"))[0]
            events = first.events()
    assert plan.fired(1)[0][:3] == ("begins", 0, 10)
    assert finished["weights_sha256"] == one_epoch_sha256
    saved = [event for event in events if event["event"] == "snapshot.saved"]
    assert [event["step"] for event in saved] == sorted(event["step"] for event in saved)
    resumed_at = [event["step"] for event in events if event["event"] == "run.resumed"]
    assert resumed_at == sorted(resumed_at)  # also where the first node comes back with what it has kept
    begins = next(i for i, e in enumerate(events) if e["event"] == "run.started" and e["generation"] == 2)
    assert all(event["generation"] >= 2 for event in events[begins:] if event["event"] == "snapshot.saved")
    tier = DurableTier(LocalStorage(places / "snapshots"))
    assert [tier.load(manifest).state["step"] for manifest in tier.manifests()][:1] == [24]
    assert audit.run(tmp_path / "ledger", event_log=places / "snapshots" / "events.jsonl", run_id=None) == 0


def test_open_files_stay_flat(mnist_dir: Path, tmp_path: Path) -> None:
    """Over 200 durable snapshots and as many in memory a worker's open files do not grow, and no file is left."""
    slow_steps = Fault(kind="sleep", place="step", ranks=(0,), step=None, seconds=0.15)  # so that each one is written
    plan = Plan(tmp_path / "faults", slow_steps)
    options = ("--train_samples=1760", "--test_samples=8", "--global_batch_size=8", "--micro_batch_size=8")
    launcher = standalone(2)
    with Job(
        tmp_path / "job", mnist_dir, launcher, (*options, "--epochs=1", "--save_every_steps=1"), plan.environment
    ) as job:
        counts: dict[int, int] = {}
        worker = job.worker(0)
        while job.process.poll() is None and job.progress()[1] < 219:
            step = eventually(lambda: job.progress()[1] if job.progress()[1] not in counts else 0)
            counts[step] = worker.num_fds()
        job.finish()
        assert len(job.events("snapshot.saved")) > 200
    early = max(count for step, count in counts.items() if 10 <= step < 60)
    late = max(count for step, count in counts.items() if step >= 160)
    assert len(counts) > 150
    assert late <= early
    assert not [path for path in (tmp_path / "job" / "snapshots").iterdir() if path.name.startswith(".")]


def test_few_files_and_many_epochs(mnist_dir: Path, tmp_path: Path) -> None:
    """With 128 open files allowed to each process, a job of 20 epochs that is killed twice ends as if undisturbed."""
    options = (*SHORT, "--epochs=20")
    expected = undisturbed(tmp_path / "undisturbed", mnist_dir, options)["weights_sha256"]
    kills = [
        Fault(kind="kill", place="step", ranks=(rank,), step=step, generation=rank)
        for rank, step in enumerate((20, 40))
    ]
    plan = Plan(tmp_path / "faults", *kills)
    launcher = ("sh", "-c", 'ulimit -n 128 && exec "$@"', "sh", *standalone(2))
    with Job(tmp_path / "job", mnist_dir, launcher, options, plan.environment) as job:
        assert resource.prlimit(job.worker(0).pid, resource.RLIMIT_NOFILE) == (128, 128)
        finished = job.finish()
        resumed: list[Event] = job.events("run.resumed")
    assert [(event["source"], event["step"]) for event in resumed] == [("memory", 20), ("memory", 40)]
    assert finished["weights_sha256"] == expected

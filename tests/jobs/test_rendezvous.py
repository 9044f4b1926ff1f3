"""torchrun's plug-in in a real torchrun: where it acts, what it leaves alone, what it gives to the workers."""

import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import SMALL, TORCHRUN, Job, eventually, free_port, plain, standalone, torchrun
from torch.distributed import HashStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from elastic_mnist.agent import rendezvous, store
from elastic_mnist.ipc import environment

# 10 steps of one epoch, the last one short.
OPTIONS = (*SMALL, "--dataset=synthetic", "--train_samples=600", "--test_samples=60", "--epochs=1")
OURS = ("ELASTIC_MNIST", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")

# Another program of the same environment: leaves its environment and arguments behind, one file a rank.
OTHER_PROGRAM = """
import json, os, pathlib, signal, sys

blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
found = {"environment": dict(os.environ), "arguments": sys.argv[1:], "blocked": blocked}
pathlib.Path("seen-" + os.environ["RANK"] + ".json").write_text(json.dumps(found))
"""

# torchrun on a torch that keeps its backends in another place: the registry is replaced before anything registers.
MOVED = """
import importlib.abc, importlib.machinery, sys

class Registry:
    def __init__(self):
        self.creators = {}

    def register(self, backend, creator):
        self.creators[backend] = creator

    def create_handler(self, parameters):
        return self.creators[parameters.backend](parameters)

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target):
        if name != "torch.distributed.elastic.rendezvous.api":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            module.rendezvous_handler_registry = Registry()

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.run import main

assert isinstance(rendezvous_handler_registry, Registry)
main()
"""
MOVED_LINE = "elastic_mnist: this torch keeps its rendezvous backends elsewhere; use --rdzv_backend=elastic_mnist"

# torchrun that leaves behind the settings with which the rendezvous was made.
OBSERVED = """
import json, pathlib
from torch.distributed.run import main
from elastic_mnist.agent import rendezvous

init = rendezvous.ElasticRendezvous.__init__

def observed_init(self, inner, *arguments, **keywords):
    settings = inner._settings
    found = {
        "keep_alive_interval": settings.keep_alive_interval.total_seconds(),
        "keep_alive_max_attempt": settings.keep_alive_max_attempt,
        "last_call_timeout": settings.timeout.last_call.total_seconds(),
    }
    pathlib.Path("seen.json").write_text(json.dumps(found))
    init(self, inner, *arguments, **keywords)

rendezvous.ElasticRendezvous.__init__ = observed_init
main()
"""


@pytest.fixture(scope="module")
def undisturbed_sha256(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of the small job in one process, without torchrun."""
    directory = tmp_path_factory.mktemp("undisturbed")
    with Job(directory, directory, plain(), OPTIONS) as job:
        return str(job.finish()["weights_sha256"])


@pytest.fixture(autouse=True)
def _is_installed() -> None:
    """The plug-in is there, and the tests' own environment is clean of what it sets."""
    assert "elastic_mnist" in {entry.name for entry in importlib.metadata.entry_points(group="torchrun.handlers")}
    assert not _of_ours(dict(os.environ))


def _of_ours(environment: dict[str, str]) -> set[str]:
    return {name for name in environment if name.startswith(OURS)}


def _run_other_program(directory: Path, launcher: Sequence[str], num_workers: int) -> str:
    """Run another program to its end, assert that no worker of it saw any of ours, and return all output."""
    (directory / "other.py").write_text(OTHER_PROGRAM)
    done = subprocess.run(launcher, cwd=directory, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    seen = [json.loads(path.read_text()) for path in directory.glob("seen-*.json")]
    assert len(seen) == num_workers
    for worker in seen:
        assert worker["environment"]["WORLD_SIZE"] == str(num_workers)
        assert not _of_ours(worker["environment"])
        assert worker["arguments"] == ["elastic_mnist"]
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("options", "num_workers"),
    [
        (("--standalone", "--nproc_per_node=2", "other.py"), 2),
        (("--nnodes=1:1", "--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:{port}", "other.py"), 1),
        (("--nnodes=1", "--master_port={port}", "other.py"), 1),
        (("--standalone", "-m", "other"), 1),
    ],
    ids=["standalone", "c10d 1:1", "static", "module"],
)
def test_other_programs_see_nothing_of_the_plug_in(options: tuple[str, ...], num_workers: int, tmp_path: Path) -> None:
    """Workers of another program get no variable and no line of ours, even where our name is their argument."""
    words = [word.format(port=free_port()) for word in options]
    assert "elastic" not in _run_other_program(tmp_path, (*TORCHRUN, *words, "elastic_mnist"), num_workers)


def test_a_moved_table_is_told_in_one_line(tmp_path: Path, undisturbed_sha256: str) -> None:
    """On a torch whose table of backends is elsewhere one line names the way out, and stock behaviour stays."""
    (tmp_path / "moved.py").write_text(MOVED)
    launcher = (sys.executable, "moved.py", "--standalone", "-m", "elastic_mnist")
    with Job(tmp_path, tmp_path, launcher, OPTIONS) as job:
        job.wait_for_step(1)
        assert not _of_ours(job.worker(0).environ())
        assert job.finish()["weights_sha256"] == undisturbed_sha256
        assert [line for line in job.output.splitlines() if line.startswith("elastic_mnist")] == [MOVED_LINE]


def test_a_moved_table_is_no_matter_for_other_programs(tmp_path: Path) -> None:
    """On a torch whose table of backends is elsewhere, another program hears nothing of it."""
    (tmp_path / "moved.py").write_text(MOVED)
    launcher = (sys.executable, "moved.py", "--standalone", "other.py", "elastic_mnist")
    assert "elastic" not in _run_other_program(tmp_path, launcher, 1)


def test_the_named_backend_works_where_the_table_has_moved(tmp_path: Path, undisturbed_sha256: str) -> None:
    """What that one line advises, `--rdzv_backend=elastic_mnist`, gives the elastic rendezvous there."""
    (tmp_path / "moved.py").write_text(MOVED)
    endpoint = f"127.0.0.1:{free_port()}"
    options = ("--rdzv_backend=elastic_mnist", f"--rdzv_endpoint={endpoint}", "--nnodes=1:2", "-m", "elastic_mnist")
    with Job(tmp_path, tmp_path, (sys.executable, "moved.py", *options), OPTIONS) as job:
        job.wait_for_step(1)
        assert job.worker(0).environ()["ELASTIC_MNIST_STORE"] == endpoint
        assert job.finish()["weights_sha256"] == undisturbed_sha256
        assert f"elastic_mnist: elastic rendezvous at {endpoint} for 1 to 2 nodes\n" in job.output


def test_the_named_backend_trains(tmp_path: Path, undisturbed_sha256: str) -> None:
    """`--rdzv_backend=elastic_mnist` with an endpoint and 1 to 2 nodes trains alone, in an elastic rendezvous."""
    endpoint = f"127.0.0.1:{free_port()}"
    launcher = torchrun("--rdzv_backend=elastic_mnist", f"--rdzv_endpoint={endpoint}", "--nnodes=1:2")
    with Job(tmp_path, tmp_path, launcher, OPTIONS) as job:
        assert job.finish()["weights_sha256"] == undisturbed_sha256
        assert f"elastic_mnist: elastic rendezvous at {endpoint} for 1 to 2 nodes\n" in job.output


def test_the_named_backend_tells_a_mistake_before_a_worker_starts(tmp_path: Path) -> None:
    """With `--rdzv_backend=elastic_mnist` too, a wrong option costs one line and no restart."""
    endpoint = f"127.0.0.1:{free_port()}"
    launcher = torchrun("--rdzv_backend=elastic_mnist", f"--rdzv_endpoint={endpoint}", "--max_restarts=2")
    with Job(tmp_path, tmp_path, launcher, ("--epoch=3",)) as job:
        assert job.wait(within=60) == 2, job.output
        assert job.output.count("elastic_mnist: error: ") == 1


def test_another_program_by_the_named_backend_is_not_deaf(tmp_path: Path) -> None:
    """Signals are held back from our own workers alone, which wait for them."""
    (tmp_path / "other.py").write_text(OTHER_PROGRAM)
    rendezvous = ("--rdzv_backend=elastic_mnist", f"--rdzv_endpoint=127.0.0.1:{free_port()}")
    subprocess.run((*TORCHRUN, *rendezvous, "other.py"), cwd=tmp_path, timeout=90, check=True)
    assert json.loads((tmp_path / "seen-0.json").read_text())["blocked"] == []


@pytest.mark.parametrize(
    ("endpoint", "is_own"),
    [
        ("", True),
        ("localhost", True),
        ("localhost:29400", True),
        ("127.0.0.2:1", True),
        ("[::1]", True),
        ("[::1]:29400", True),
        ("0.0.0.0:29400", True),
        (socket.gethostname(), True),
        ("192.0.2.1:29400", False),  # for documentation, nobody's
        ("a" * 64, False),
        ("no-such-host.invalid:1", False),
    ],
)
def test_which_endpoint_is_this_machine(endpoint: str, is_own: bool) -> None:
    """An endpoint as torch reads it, by any address or name of this machine; one that leads nowhere is no error."""
    assert store.is_own(endpoint) == is_own


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_refused_node_ends_as_refused_also_beside_others(
    monkeypatch: pytest.MonkeyPatch,
    is_refused: bool,
) -> None:
    """Where its workers have failed for good because they were refused, it ends with 2; else it leaves in peace."""
    monkeypatch.setenv(environment.AGENT_PID, "")  # to be restored
    inner = SimpleNamespace(settings=SimpleNamespace(min_nodes=1))
    handler = rendezvous.ElasticRendezvous(
        inner,  # type: ignore[arg-type]
        "c10d",
        None,
        HashStore(),
        "here",
        last_call=SimpleNamespace(),  # type: ignore[arg-type]
        watch=None,
    )
    handler._num_others = 1
    saves: list[dict[str, bool]] = []
    node = SimpleNamespace(is_refused=is_refused, end=lambda: None, save=lambda **how: saves.append(how))
    handler._node = node  # type: ignore[assignment]

    def end() -> None:
        try:
            raise ChildFailedError("elastic_mnist", {0: ProcessFailure(0, 1, 1, "")})
        finally:
            handler.shutdown()

    with pytest.raises(rendezvous.AgentExit if is_refused else ChildFailedError) as ended:
        end()
    assert getattr(ended.value, "status", None) == (2 if is_refused else None)
    assert saves == [{"are_others_at_work": True}]


def test_a_signal_to_a_worker_stops_its_node_though_restarts_are_left(tmp_path: Path, undisturbed_sha256: str) -> None:
    """As a scheduler's notice to each process may come: the job ends with 143, saved, and is not begun anew."""
    with Job(tmp_path, tmp_path, standalone(2), OPTIONS) as job:
        job.wait_for_step(3)
        job.kill(1, signal.SIGTERM)
        assert job.wait(within=60) == 143
        assert [event["generation"] for event in job.events("run.started")] == [0]
        assert len(job.events("run.stopped")) == 1
        assert "elastic_mnist: stopped; the same command goes on from here" in job.output
        assert "Traceback" not in job.output
    with Job(tmp_path, tmp_path, standalone(2), OPTIONS) as job:
        assert job.finish()["weights_sha256"] == undisturbed_sha256


def test_a_signal_to_a_worker_in_its_set_up_stops_its_node(tmp_path: Path) -> None:
    """Before there is anything to save, too: 143, and no second generation."""
    with Job(tmp_path, tmp_path, standalone(2), OPTIONS) as job:
        eventually(lambda: len(job.workers()) == 2)
        job.kill(1, signal.SIGTERM)
        assert job.wait(within=60) == 143
        assert job.events("run.started") == []
        assert "elastic_mnist: stopped; the same command goes on from here" in job.output
        assert "Traceback" not in job.output


@pytest.mark.parametrize("max_restarts", [0, 3])
def test_a_stopped_job_goes_on_with_its_rendezvous_in_the_same_file(
    max_restarts: int, tmp_path: Path, undisturbed_sha256: str
) -> None:
    """A stop through a worker does not end the job for good: the same command finds the rendezvous open."""
    rendezvous = ("--rdzv_backend=c10d", "--rdzv_conf=store_type=file", f"--rdzv_endpoint={tmp_path}/rendezvous")
    launcher = torchrun(*rendezvous, "--nnodes=1:2", f"--max_restarts={max_restarts}")
    with Job(tmp_path, tmp_path, launcher, OPTIONS) as job:
        job.wait_for_step(3)
        job.kill(0, signal.SIGTERM)
        assert job.wait(within=60) == 143
    with Job(tmp_path, tmp_path, launcher, OPTIONS) as job:
        assert job.finish()["weights_sha256"] == undisturbed_sha256
        (resumed,) = job.events("run.resumed")
        assert resumed["num_lost_steps"] == 0


def test_a_node_too_many_ends_with_the_job(tmp_path: Path) -> None:
    """One that waited in case it were needed says so when the job has ended well, and exits 0."""
    rendezvous = ("--rdzv_backend=c10d", "--rdzv_conf=store_type=file", f"--rdzv_endpoint={tmp_path}/rendezvous")
    launcher = torchrun(*rendezvous, "--nnodes=1:1")
    with Job(tmp_path, tmp_path, launcher, (*OPTIONS, "--train_samples=6000")) as first:
        first.wait_for_step(1)
        with Job(tmp_path, tmp_path, launcher, (*OPTIONS, "--train_samples=6000")) as spare:
            eventually(lambda: "elastic rendezvous" in spare.output)
            assert first.progress()[1] < 90  # it did come while the job was at work
            first.finish()
            assert spare.wait(within=60) == 0
            assert "has ended, and had no need of this node" in spare.output
            assert "Traceback" not in spare.output


def test_a_port_that_is_taken_is_told_by_the_static_rendezvous_too(tmp_path: Path) -> None:
    """One line with the way out, and status 2."""
    with socket.create_server(("0.0.0.0", 0)) as server:  # noqa: S104 - as torch's own does
        launcher = torchrun("--nnodes=1", f"--master_port={server.getsockname()[1]}")
        with Job(tmp_path, tmp_path, launcher, OPTIONS) as job:
            assert job.wait(within=60) == 2
            (line,) = [line for line in job.output.splitlines() if line.startswith("elastic_mnist: error: ")]
            assert line == "elastic_mnist: error: the port is taken; choose another --master_port"


def test_a_refusal_in_a_later_life_stands_in_the_log(tmp_path: Path) -> None:
    """Where the record is spoilt and a worker dies, the log tells why the job ends; the terminal tells it once."""
    options = (*OPTIONS, "--memory_snapshot_every=0")
    with Job(tmp_path, tmp_path, standalone(2), options) as job:
        job.wait_for_step(2)
        (tmp_path / "snapshots" / "run.json").write_text("{")
        job.kill(0)
        assert job.wait(within=60) == 2
        (failed,) = job.events("run.failed")
        assert "run.json: damaged" in failed["reason"]
        assert job.output.count("elastic_mnist: error: ") == 1


def test_a_c10d_rendezvous_survives_a_kill(tmp_path: Path, undisturbed_sha256: str) -> None:
    """`--rdzv_backend=c10d` as users write it gets generations of its own: a killed worker leaves no trace."""
    endpoint = f"127.0.0.1:{free_port()}"
    rendezvous = ("--rdzv_backend=c10d", f"--rdzv_endpoint={endpoint}", "--rdzv_id=x")
    launcher = torchrun(*rendezvous, "--nnodes=1:2", "--nproc_per_node=2", "--max_restarts=1")
    with Job(tmp_path, tmp_path, launcher, OPTIONS) as job:
        job.wait_for_step(3)
        job.kill(1)
        finished = job.finish()
        assert finished["num_restarts"] == 1
        assert finished["weights_sha256"] == undisturbed_sha256
        lines = [line for line in job.output.splitlines() if line.startswith("elastic_mnist: ")]
        assert lines == [f"elastic_mnist: elastic rendezvous at {endpoint} for 1 to 2 nodes"]


def test_a_static_rendezvous_of_a_fixed_size_stays_stock(tmp_path: Path, undisturbed_sha256: str) -> None:
    """A launch of a fixed number of nodes stays torchrun's own, and a killed worker leaves no trace all the same."""
    launcher = torchrun("--nnodes=1", "--nproc_per_node=2", f"--master_port={free_port()}", "--max_restarts=1")
    with Job(tmp_path, tmp_path, launcher, OPTIONS) as job:
        job.wait_for_step(3)
        ours = _of_ours(job.worker(0).environ())  # who the agent is, but no store and no generation
        assert ours <= {f"ELASTIC_MNIST_{name}" for name in ("AGENT_PID", "JOB_ID", "MEMORY", "PULSE")}
        job.kill(1)
        finished = job.finish()
        assert finished["num_restarts"] == 1
        assert finished["weights_sha256"] == undisturbed_sha256
        assert not [line for line in job.output.splitlines() if line.startswith("elastic_mnist")]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((), {"keep_alive_interval": 1, "keep_alive_max_attempt": 5, "last_call_timeout": 1}),
        (
            ("--rdzv_conf=keep_alive_interval=4,last_call_timeout=2",),
            {"keep_alive_interval": 4, "keep_alive_max_attempt": 5, "last_call_timeout": 2},
        ),
    ],
    ids=["nothing", "interval and last call"],
)
def test_what_the_user_configures_wins(asked: tuple[str, ...], expected: dict[str, float], tmp_path: Path) -> None:
    """Keys of `--rdzv_conf` reach the rendezvous as they were given; only the others get our defaults."""
    (tmp_path / "observed.py").write_text(OBSERVED)
    launcher = (sys.executable, "observed.py", "--nnodes=1:2", f"--master_port={free_port()}", *asked)
    with Job(tmp_path, tmp_path, (*launcher, "-m", "elastic_mnist"), OPTIONS) as job:
        job.worker(0)
        assert json.loads((tmp_path / "seen.json").read_text()) == expected


def test_two_jobs_at_once_do_not_see_each_other(tmp_path: Path, undisturbed_sha256: str) -> None:
    """Two jobs on one host, one of which loses a worker while the other stands still, end as if each were alone."""
    with Job(tmp_path / "alone", tmp_path, plain(), (*OPTIONS, "--seed=1")) as job:
        alone = {1: undisturbed_sha256, 2: job.finish()["weights_sha256"]}
    assert alone[1] != alone[2]
    with (
        Job(tmp_path / "1", tmp_path, standalone(2), OPTIONS) as first,
        Job(tmp_path / "2", tmp_path, standalone(2), (*OPTIONS, "--seed=1")) as second,
    ):
        second.wait_for_step(1)
        standing = [second.kill(rank, signal.SIGSTOP) for rank in (0, 1)]
        first.wait_for_step(1)
        first.kill(1)
        first.wait_for_step(1, generation=1)
        assert second.progress()[0] == 0
        for worker in standing:
            worker.send_signal(signal.SIGCONT)
        ends = {1: first.finish(), 2: second.finish()}
    assert {seed: end["weights_sha256"] for seed, end in ends.items()} == alone
    assert {seed: (end["num_restarts"], end["world_size"]) for seed, end in ends.items()} == {1: (1, 2), 2: (0, 2)}


def test_a_generations_key_is_shared_by_all_its_workers_and_by_no_other(tmp_path: Path) -> None:
    """Workers of two agents get one key, and after a kill all of them get one that was not used before."""
    endpoint = f"127.0.0.1:{free_port()}"
    rendezvous = ("--rdzv_backend=c10d", f"--rdzv_endpoint={endpoint}", "--rdzv_id=x", "--nnodes=2:2")
    launcher = torchrun(*rendezvous, "--max_restarts=2")
    options = (*OPTIONS, "--epochs=100")
    keys: list[str] = []
    with (
        Job(tmp_path, tmp_path, launcher, options) as first,
        Job(tmp_path, tmp_path, launcher, options) as second,
    ):
        for generation in range(2):
            first.wait_for_step(1, generation=generation)
            workers = [*first.workers(), *second.workers()]
            environments = [worker.environ() for worker in workers]
            assert {environment["RANK"] for environment in environments} == {"0", "1"}
            assert len({environment["ELASTIC_MNIST_AGENT_PID"] for environment in environments}) == 2
            assert {environment["ELASTIC_MNIST_STORE"] for environment in environments} == {endpoint}
            (key,) = {environment["ELASTIC_MNIST_GENERATION_KEY"] for environment in environments}
            keys.append(key)
            workers[1].kill()
    assert len(set(keys)) == 2

"""Ranks that meet, agree, and lose each other: real processes around a real store."""

import hashlib
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
import torch.distributed as dist
from harness import WAIT_SECONDS, alive, eventually, free_port
from torch.nn.functional import nll_loss
from typing_extensions import Self

from elastic_mnist.errors import PeerLost
from elastic_mnist.ipc import heartbeat
from elastic_mnist.ipc.environment import WorkerEnvironment
from elastic_mnist.ipc.heartbeat import WAITING
from elastic_mnist.telemetry import events
from elastic_mnist.training import model
from elastic_mnist.training.evaluation import evaluate
from elastic_mnist.training.pool import MicroBatchPool
from elastic_mnist.training.sampler import Position
from elastic_mnist.worker import rendezvous_store
from elastic_mnist.worker.heartbeat import heartbeat_writer
from elastic_mnist.worker.process_group import World

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

CPU = torch.device("cpu")
TIMEOUT = 60.0

Say = Callable[[object], None]
Role = Callable[..., object]  # (place, say, *arguments), in a process of its own


def _play(role: Role, place: WorkerEnvironment, connection: Connection, arguments: tuple[object, ...]) -> None:
    """Run a role in its process; what it returns, or what it raises, is the last thing it says."""
    try:
        connection.send(role(place, connection.send, *arguments))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the test is to see it
        connection.send(error)
        os._exit(1)  # at once, as a worker does
    connection.recv()  # stays until the test is over: nobody loses a peer that has merely finished first


class Ranks:
    """The ranks of one generation: a process each, which plays a role and reports to the test."""

    def __init__(self, role: Role, *arguments: object, size: int, **place: Any) -> None:  # noqa: ANN401 - of `WorkerEnvironment`
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["torch", "elastic_mnist.worker.process_group", "elastic_mnist.training.evaluation"]
        )
        self._role = role
        self._arguments = arguments
        self._places = [
            WorkerEnvironment(
                **{"rank": rank, "local_rank": rank, "world_size": size, "local_world_size": size, **place}
            )
            for rank in range(size)
        ]
        self.processes: dict[int, BaseProcess] = {}
        self._connections: dict[int, Connection] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for rank in self.processes:
            self.kill(rank)

    def start(self, *ranks: int) -> Self:
        """Start some ranks; all, if none is named."""
        for rank in ranks or range(len(self._places)):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_play, args=(self._role, self._places[rank], theirs, self._arguments), daemon=True
            )
            process.start()
            theirs.close()
            self.processes[rank], self._connections[rank] = process, ours
        return self

    def hear(self, rank: int, *, within: float = WAIT_SECONDS) -> Any:  # noqa: ANN401 - whatever a role says
        """Return the next thing a rank says."""
        assert self._connections[rank].poll(within), f"rank {rank} said nothing within {within} s"
        return self._connections[rank].recv()

    def hear_all(self) -> list[Any]:
        """Return the next thing that each rank says."""
        return [self.hear(rank) for rank in self.processes]

    def kill(self, rank: int) -> None:
        """End a rank by SIGKILL, and prove it."""
        self.processes[rank].kill()
        self.processes[rank].join(WAIT_SECONDS)
        assert self.processes[rank].exitcode is not None

    def pid(self, rank: int) -> int:
        """Return a rank's process id."""
        pid = self.processes[rank].pid
        assert pid is not None
        return pid


@pytest.fixture
def store() -> dist.TCPStore:
    """A store that outlives its ranks, as an agent's does."""
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=WAIT_SECONDS)
    )


def hosted(store: dist.TCPStore) -> dict[str, Any]:
    """Return the fields of a place whose store an agent serves."""
    return {"endpoint": ("127.0.0.1", store.port), "is_hosted": True}


# Meeting


def agree(place: WorkerEnvironment, _say: Say) -> str:
    """Agree on a generation's key, and on nothing else."""
    timeout = timedelta(seconds=TIMEOUT)
    return rendezvous_store.generation_handshake(
        rendezvous_store.connect(place, timeout), place.rank, place.world_size, timeout
    )


def meet(place: WorkerEnvironment, _say: Say) -> int:
    """Meet, and add up one power of two a rank."""
    here = World(place, CPU, timeout=TIMEOUT)
    total = torch.tensor([2**place.rank])
    here.all_reduce(total)
    return int(total)


def words(store: dist.TCPStore) -> dist.PrefixStore:
    """Return the words that ranks leave when they agree on a key."""
    return dist.PrefixStore("elastic_mnist/roster", store)


def roster(store: dist.TCPStore) -> str:
    """Return the roster that stands in the store."""
    return words(store).get("roster").decode() if words(store).check(["roster"]) else ""


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dead_size", [2, 3])
def test_the_dead_do_not_disturb_an_agreement(dead_size: int, size: int, store: dist.TCPStore) -> None:
    """In a store with the words of a whole dead generation and of one that died half-way, a new key is agreed on."""
    with Ranks(agree, size=dead_size, **hosted(store)) as dead:
        (dead_key,) = set(dead.start().hear_all())
    with Ranks(agree, size=dead_size, **hosted(store)) as half_dead:
        before = words(store).get("hello/1")
        half_dead.start(1)
        eventually(lambda: words(store).get("hello/1") != before, what="the hello of a rank that dies alone")
    acknowledged = [f"{dead_key}/{rank}" for rank in range(dead_size)]
    assert words(store).check(["roster", *acknowledged, *(f"hello/{rank}" for rank in range(dead_size))])
    with Ranks(agree, size=size, **hosted(store)) as living:
        keys = living.start().hear_all()
    assert len(keys) == size
    assert len(set(keys)) == 1
    assert re.fullmatch("[0-9a-f]{64}", keys[0])
    assert keys[0] != dead_key


def test_a_roster_with_the_dead_on_it_is_not_believed(store: dist.TCPStore) -> None:
    """Rank 0 that has put dead ranks on its roster, before the living came, looks again."""
    with Ranks(agree, size=3, **hosted(store)) as dead:
        (dead_key,) = set(dead.start().hear_all())
        old = roster(store)
    with Ranks(agree, size=3, **hosted(store)) as living:
        living.start(0)
        wrong = eventually(lambda: roster(store) if roster(store) != old else "", what="a roster with dead ranks on it")
        assert wrong.split()[1:] == old.split()[1:]
        keys = living.start(2, 1).hear_all()
    assert len(set(keys)) == 1
    assert keys[0] not in (dead_key, hashlib.sha256(wrong.encode()).hexdigest())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_meet_without_a_key_where_others_met_before(size: int, store: dist.TCPStore) -> None:
    """Two generations of process groups, one killed, the next of another size: the second adds up as the first did."""
    with Ranks(meet, size=2, **hosted(store)) as dead:
        assert dead.start().hear_all() == [3, 3]
    with Ranks(meet, size=size, **hosted(store)) as living:
        assert living.start().hear_all() == [2**size - 1] * size


def test_ranks_meet_at_rank_0_where_no_agent_serves() -> None:
    """With an endpoint that nobody serves, rank 0 serves it, whoever comes first."""
    with Ranks(meet, size=2, endpoint=("127.0.0.1", free_port())) as ranks:
        assert ranks.start(1, 0).hear_all() == [3, 3]


def test_a_rank_that_stays_away_is_a_lost_peer(store: dist.TCPStore) -> None:
    """Where one of two ranks does not come, the other says so within its timeout."""
    with Ranks(meet_for_two_seconds, size=2, **hosted(store)) as ranks:
        error = ranks.start(1).hear(1)
    assert isinstance(error, PeerLost)
    assert str(error) == "meeting: not all of the 2 ranks came within 2 s"


def meet_for_two_seconds(place: WorkerEnvironment, _say: Say) -> None:
    """Meet with little patience."""
    World(place, CPU, timeout=TIMEOUT, meeting_timeout=2.0)


# Sending


def payload(size: int) -> bytes:
    """Return the same random bytes in every process."""
    return random.Random(size).randbytes(size)  # noqa: S311 - the same everywhere, not secret


def send(place: WorkerEnvironment, _say: Say, sizes: list[int]) -> list[str]:
    """Receive the bytes that the last rank broadcasts."""
    here = World(place, CPU, timeout=TIMEOUT)
    last = place.world_size - 1
    received = [here.broadcast_bytes(payload(size) if place.rank == last else None, source=last) for size in sizes]
    assert all(type(data) is bytes for data in received)
    return [f"{len(data)} {hashlib.sha256(data).hexdigest()}" for data in received]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_broadcast_arrives_whole(size: int, store: dist.TCPStore) -> None:
    """Nothing, one byte and 10 MiB, one after the other, arrive at every rank as the last rank sent them."""
    sizes = [0, 1, 10 * 2**20, 0, 3]
    sent = [f"{len(data)} {hashlib.sha256(data).hexdigest()}" for data in map(payload, sizes)]
    with Ranks(send, sizes, size=size, **hosted(store)) as ranks:
        assert ranks.start().hear_all() == [sent] * size


def exchange(place: WorkerEnvironment, _say: Say) -> object:
    """Gather a position of each rank, then get all of them from rank 0."""
    here = World(place, CPU, timeout=TIMEOUT)
    gathered = here.gather(Position(step=place.rank))
    return here.broadcast(gathered if place.rank == 0 else None)


@pytest.mark.parametrize("size", [1, 3])
def test_objects_are_gathered_in_the_ranks_order(size: int, store: dist.TCPStore) -> None:
    """Rank 0 gets every rank's object in order, and each rank gets rank 0's object."""
    with Ranks(exchange, size=size, **hosted(store)) as ranks:
        assert ranks.start().hear_all() == [[Position(step=rank) for rank in range(size)]] * size


def send_damaged(place: WorkerEnvironment, _say: Say) -> bytes:
    """Broadcast bytes of which one is flipped on the way to rank 1."""
    here = World(place, CPU, timeout=TIMEOUT)
    if place.rank == 1:
        receive = here.broadcast

        def damaged(value: Any, *, source: int = 0) -> Any:  # noqa: ANN401 - as `World.broadcast`
            data, digest = receive(value, source=source)
            return bytes([data[0] ^ 1]) + data[1:], digest

        setattr(here, "broadcast", damaged)  # noqa: B010 - a method
    return here.broadcast_bytes(payload(1000) if place.rank == 0 else None)


def test_a_state_that_is_damaged_on_its_way_is_not_used(store: dist.TCPStore) -> None:
    """Where one bit of the bytes flips between the ranks, the receiver raises PeerLost."""
    with Ranks(send_damaged, size=2, **hosted(store)) as ranks:
        sent, error = ranks.start().hear_all()
    assert sent == payload(1000)
    assert isinstance(error, PeerLost)
    assert "the 1,000 bytes that arrived are not those that rank 0 sent" in str(error)


# Losing each other


def add_up_for_ever(place: WorkerEnvironment, say: Say, timeout: float) -> None:
    """Add up until something happens; says when the first sums are made."""
    here = World(place, CPU, timeout=timeout)
    numbers = torch.ones(100_000, dtype=torch.int64)
    for _ in range(3):
        here.all_reduce(numbers)
    say("adding")
    while True:
        here.all_reduce(numbers)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_peer_is_lost_to_all_others(victim: int, store: dist.TCPStore) -> None:
    """SIGKILL of one of three ranks in the middle of all-reduces raises PeerLost at both others, each of which ends."""
    with Ranks(add_up_for_ever, TIMEOUT, size=3, **hosted(store)) as ranks:
        assert ranks.start().hear_all() == ["adding"] * 3
        ranks.kill(victim)
        assert ranks.processes[victim].exitcode == -signal.SIGKILL
        for survivor in {0, 1, 2} - {victim}:
            error = ranks.hear(survivor, within=TIMEOUT / 2)  # a killed peer is no silent one
            assert isinstance(error, PeerLost), error
            assert str(error).startswith("all-reduce: ")
            assert "\n" not in str(error)


def beat_and_add_up(place: WorkerEnvironment, say: Say, timeout: float, doing: str, log: Path) -> None:
    """Give signs of life, make three sums, then wait for one that rank 1 does not make, or not for a while.

    Args:
        place: of this rank.
        say: tells the test.
        timeout: of a silent peer.
        doing: what rank 1 does: "nothing" for ever, "something" for three times the timeout, or "waiting" for rank 0.
        log: where both tell.
    """
    heartbeat_writer.start(None, local_rank=0, hang_timeout=TIMEOUT)
    here = World(place, CPU, timeout=timeout)
    events.configure(log, rank=place.rank, world_size=2, log_format="json")
    heartbeat_writer.step = 0  # set up
    numbers = torch.ones(10, dtype=torch.int64)
    for _ in range(3):
        here.all_reduce(numbers)
    say("adding")
    if place.rank == 1 and doing == "waiting":
        with heartbeat_writer.phase(WAITING):
            time.sleep(10**6)
    if place.rank == 1:
        time.sleep(timeout * 3 if doing == "something" else 10**6)
    here.all_reduce(numbers)
    say("added")


def hung_peers(log: Path) -> list[str]:
    """Return the reasons of the `peer.hung` in a log, once there is one."""
    told = eventually(
        lambda: [line for line in log.read_text().splitlines() if "peer.hung" in line] if log.exists() else []
    )
    return [json.loads(line)["reason"] for line in told]


def test_a_silent_peer_is_noticed(store: dist.TCPStore, tmp_path: Path) -> None:
    """SIGSTOP of a rank ends the one that waits for it, though the connection stands, and names it."""
    with Ranks(beat_and_add_up, 2.0, "nothing", tmp_path / "log", size=2, **hosted(store)) as ranks:
        assert ranks.start().hear_all() == ["adding"] * 2
        stopped = psutil.Process(ranks.pid(1))
        stopped.suspend()
        eventually(lambda: stopped.status() == psutil.STATUS_STOPPED, what="a stopped rank")
        (reason,) = hung_peers(tmp_path / "log")
        assert reason.startswith("rank 1 has given no sign of life for ")
        ranks.processes[0].join(WAIT_SECONDS)
        assert ranks.processes[0].exitcode == 1
        assert alive(stopped)
        assert stopped.status() == psutil.STATUS_STOPPED


def connect_to_nobody(place: WorkerEnvironment, say: Say, log: Path) -> None:
    """Meet a rank that has taken its seat, and is gone before it could connect."""
    setattr(heartbeat, "SETTING_UP_SECONDS", 1.0)  # noqa: B010 - a constant, and of this process alone
    heartbeat_writer.start(None, local_rank=0, hang_timeout=TIMEOUT)
    events.configure(log, rank=place.rank, world_size=2, log_format="json")
    say("meeting")
    World(place, CPU, timeout=1.0)


def test_a_peer_that_is_lost_while_they_connect_is_noticed(store: dist.TCPStore, tmp_path: Path) -> None:
    """A rank that was there when they met, and is not when they make the process group, is not waited for for ever."""
    place = {**hosted(store), "generation_key": "key"}
    dist.PrefixStore("elastic_mnist/key", store).set("seat/1", "0")  # its last word
    with Ranks(connect_to_nobody, tmp_path / "log", size=2, **place) as ranks:
        assert ranks.start(0).hear(0) == "meeting"
        (reason,) = hung_peers(tmp_path / "log")
        assert reason.startswith("rank 1 has given no sign of life for ")
        ranks.processes[0].join(WAIT_SECONDS)
        assert ranks.processes[0].exitcode == 1


def test_a_slow_peer_is_waited_for(store: dist.TCPStore, tmp_path: Path) -> None:
    """A rank that lives and takes three times the timeout for its step is no hung one."""
    with Ranks(beat_and_add_up, 1.0, "something", tmp_path / "log", size=2, **hosted(store)) as ranks:
        assert ranks.start().hear_all() == ["adding"] * 2
        assert ranks.hear_all() == ["added"] * 2


def test_a_store_that_falls_silent_is_noticed(tmp_path: Path) -> None:
    """A process that waits for a peer while the store is stopped does not wait for ever; it tells so, and ends."""
    code = """
import time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(10**6)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            place = {"endpoint": ("127.0.0.1", int(server.stdout.readline())), "is_hosted": True}
            with Ranks(beat_and_add_up, 2.0, "nothing", tmp_path / "log", size=2, **place) as ranks:
                assert ranks.start().hear_all() == ["adding"] * 2
                server.send_signal(signal.SIGSTOP)
                (reason,) = hung_peers(tmp_path / "log")
            assert reason.startswith("the store has not answered for ")
        finally:
            server.kill()


def test_ranks_that_wait_for_each_other_are_noticed(store: dist.TCPStore, tmp_path: Path) -> None:
    """Where all live and all wait, as when a link between two of them swallows what is sent, that is told and ends."""
    with Ranks(beat_and_add_up, 2.0, "waiting", tmp_path / "log", size=2, **hosted(store)) as ranks:
        assert ranks.start().hear_all() == ["adding"] * 2
        reasons = hung_peers(tmp_path / "log")
    assert all(reason.startswith("all ranks are alive and have waited for each other") for reason in reasons)


# Evaluating


def questions(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random images, and labels of which the untrained network gets about a tenth right."""
    draw = torch.Generator().manual_seed(num_samples)
    images = torch.randint(0, 256, (num_samples, 28, 28), dtype=torch.uint8, generator=draw)
    return images, torch.randint(0, 10, (num_samples,), generator=draw)


def judge(place: WorkerEnvironment, _say: Say, num_samples: int, num_threads: int) -> str:
    """Evaluate an untrained network together."""
    here = World(place, CPU, timeout=TIMEOUT)
    images, labels = questions(num_samples)
    result = evaluate(
        model.build(0),
        images,
        labels,
        device=CPU,
        precision="fp32",
        pool=MicroBatchPool(num_threads),
        all_reduce=here.all_reduce,
        rank=here.rank,
        world_size=here.size,
    )
    return json.dumps({name: float(value).hex() for name, value in asdict(result).items()})


@pytest.mark.parametrize("num_samples", [7, 1_001])
def test_an_evaluation_is_the_same_at_any_world_size(num_samples: int, store: dist.TCPStore) -> None:
    """At 1, 2 and 3 ranks each sample counts once, and loss and accuracy are the same to the last bit at every rank."""
    results = []
    for size, num_threads in ((1, 1), (2, 1), (3, 2)):
        place = {**hosted(store), "generation_key": f"of {size}"}
        with Ranks(judge, num_samples, num_threads, size=size, **place) as ranks:
            results += ranks.start().hear_all()
    assert len(results) == 6
    assert len(set(results)) == 1
    result = {name: float.fromhex(value) for name, value in json.loads(results[0]).items()}

    images, labels = questions(num_samples)
    with torch.inference_mode():
        outputs = model.build(0)(model.normalise(images))
    num_right = int((outputs.argmax(dim=1) == labels).sum())
    assert result["num_samples"] == num_samples
    assert result["accuracy"] == num_right / num_samples
    assert result["loss"] == pytest.approx(nll_loss(outputs.double(), labels).item(), rel=1e-5)

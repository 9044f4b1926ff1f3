"""Two nodes with a real network between them, whose cable is pulled: nothing is refused or reset, it is just silent.

Each node has a network namespace of its own, and is wired to a switch in a third one; pulled is the cable between the
switch and the second node. That needs Linux, root and `ip` (iproute2).
"""

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Job, eventually
from nodes import END_SECONDS, GO_ON_SECONDS, HANG_SECONDS, Place, finish, node, undisturbed, wait_for_world

PORT = 29500  # of a host that nobody else is on


class Network:
    """Two hosts, A and B, and a switch."""

    def __init__(self) -> None:
        self._name = f"em{uuid.uuid4().hex[:6]}"
        self._hosts = {letter: f"10.77.0.{number}" for number, letter in enumerate("AB", start=1)}

    def lay(self) -> None:
        """Make it all."""
        self._ip("netns", "add", f"{self._name}S")
        self._ip("link", "add", "bridge", "type", "bridge", on="S")
        self._ip("link", "set", "bridge", "up", on="S")
        for letter, address in self._hosts.items():
            self._ip("netns", "add", f"{self._name}{letter}")
            files = self._files(letter)  # nobody answers for names there
            files.mkdir(parents=True)
            names = "".join(f"{address} host-{letter}\n" for letter, address in self._hosts.items())
            (files / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
            (files / "resolv.conf").write_text("nameserver 127.0.0.1\n")
            peer = ("peer", "name", f"port{letter}", "netns", f"{self._name}S")
            self._ip("link", "add", "wire", "type", "veth", *peer, on=letter)
            self._ip("link", "set", f"port{letter}", "master", "bridge", "up", on="S")
            self._ip("address", "add", f"{address}/24", "dev", "wire", on=letter)
            for interface in ("lo", "wire"):
                self._ip("link", "set", interface, "up", on=letter)

    def pull(self) -> None:
        """Pull B's cable out of the switch, and prove that nothing comes through."""
        self._ip("link", "set", "portB", "down", on="S")
        assert not self._reaches("B", "A")

    def plug(self) -> None:
        """Put it back, and wait until B reaches A."""
        self._ip("link", "set", "portB", "up", on="S")
        eventually(lambda: self._reaches("B", "A"))

    def node(self, letter: str, directory: Path, *, read_timeout: int = 60) -> Job:
        """Start a node of the job on a host, the README's line with the first host's address."""
        return node(
            directory,
            f"--master_addr={self._hosts['A']}",
            f"--master_port={PORT}",
            f"--rdzv_conf=read_timeout={read_timeout}",
            address=self._hosts[letter],
            before=("ip", "netns", "exec", f"{self._name}{letter}"),
            environment={"GLOO_SOCKET_IFNAME": "wire"},
        )

    def remove(self) -> None:
        """Leave nothing of it."""
        for letter in "ABS":
            subprocess.run(["ip", "netns", "delete", f"{self._name}{letter}"], check=False, capture_output=True)
            shutil.rmtree(self._files(letter), ignore_errors=True)
        with contextlib.suppress(OSError):  # others may have theirs there
            self._files("A").parent.rmdir()

    def _files(self, letter: str) -> Path:
        return Path("/etc/netns") / f"{self._name}{letter}"  # `ip netns exec` shows them in /etc

    def _ip(self, *words: str, on: str | None = None) -> None:
        where = ("-netns", f"{self._name}{on}") if on else ()
        subprocess.run(["ip", *where, *words], check=True, capture_output=True, text=True)

    def _reaches(self, one: str, other: str) -> bool:
        """Whether one host finds the other's hardware address: the first thing that it would have to."""
        self._ip("neighbour", "flush", "dev", "wire", on=one)
        ask = "import socket, sys; socket.create_connection((sys.argv[1], 9), timeout=2)"
        command = ["ip", "netns", "exec", f"{self._name}{one}", "python3", "-c", ask, self._hosts[other]]
        return "ConnectionRefusedError" in subprocess.run(command, check=False, capture_output=True, text=True).stderr


@pytest.fixture
def network() -> Iterator[Network]:
    """A network; where it cannot be had, the test is skipped with the reason."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` here (iproute2)")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    network = Network()
    try:
        try:
            network.lay()
        except (subprocess.CalledProcessError, OSError) as error:
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")
        yield network
    finally:
        network.remove()


@pytest.fixture(scope="module")
def undisturbed_sha256(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights when one process does it all."""
    return undisturbed(tmp_path_factory.mktemp("undisturbed"))


def test_a_node_that_is_cut_off_ends_and_another_takes_its_place(
    network: Network, tmp_path: Path, undisturbed_sha256: str
) -> None:
    """The node with the rendezvous goes on alone; the other one ends, saying why; with the cable back, one joins."""
    place = Place(tmp_path)
    with network.node("A", tmp_path) as first:
        wait_for_world(first, 1, after=-1, within=90)
        with network.node("B", tmp_path, read_timeout=10) as second:
            wait_for_world(first, 2, after=0, within=90)
            network.pull()
            wait_for_world(first, 1, after=1, within=HANG_SECONDS + GO_ON_SECONDS, meanwhile=place.look)
            assert second.wait(within=END_SECONDS) == 1
            assert "Traceback" not in second.output
            assert second.output.count("elastic_mnist: error: the rendezvous at 10.77.0.1:29500 is gone: ") == 1
        network.plug()
        with network.node("B", tmp_path):
            wait_for_world(first, 2, after=2, within=90, meanwhile=place.look)
            assert max(event["num_lost_steps"] for event in first.events("run.resumed")) <= 1
            first.kill_all()
    assert finish(tmp_path) == undisturbed_sha256


@pytest.mark.slow
def test_a_node_that_was_cut_off_for_a_while_comes_back(
    network: Network, tmp_path: Path, undisturbed_sha256: str
) -> None:
    """The node with the rendezvous goes on alone; the cable is back within a minute, and so is the other one."""
    place = Place(tmp_path)
    with network.node("A", tmp_path) as first:
        wait_for_world(first, 1, after=-1, within=90)
        with network.node("B", tmp_path) as second:
            wait_for_world(first, 2, after=0, within=90)
            network.pull()
            wait_for_world(first, 1, after=1, within=HANG_SECONDS + GO_ON_SECONDS, meanwhile=place.look)
            network.plug()
            wait_for_world(first, 2, after=2, within=90, meanwhile=place.look)
            assert second.process.poll() is None
            first.kill_all()
    assert finish(tmp_path) == undisturbed_sha256

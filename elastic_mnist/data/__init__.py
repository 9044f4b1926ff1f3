"""The data sets: found or fetched, verified, and held in memory as bytes.

Purpose: give a worker its images, and give up in one line where they cannot be had.
Invariant: no tensor is built from a file that is not, byte for byte, what its publisher released.
Callers: the launcher calls :func:`ensure` before any worker starts, each worker calls :func:`load`.
Neither is collective: processes of one node agree through a lock in the data directory.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from elastic_mnist.data import fetch as _fetch
from elastic_mnist.data import idx, synthetic
from elastic_mnist.errors import DataError
from elastic_mnist.settings import DATASETS

__all__ = ["DATASETS", "Dataset", "ensure", "load"]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A data set in memory, cut to the samples that were asked for."""

    name: str
    train_images: Tensor
    """``(num_train, 28, 28)``, uint8."""
    train_labels: Tensor
    """``(num_train,)``, int64."""
    test_images: Tensor
    """``(num_test, 28, 28)``, uint8."""
    test_labels: Tensor
    """``(num_test,)``, int64."""
    sha256: str
    """Over what is trained on, and so what a result hangs on: the images in use, then their labels, a byte each."""


def load(
    name: str, data_dir: Path, *, train_samples: int | None, test_samples: int | None, seed: int, fetch: bool = True
) -> Dataset:
    """Return the first ``train_samples`` and ``test_samples`` of a data set; ``None`` means all.

    ``seed`` draws the synthetic set and means nothing to the others. What ``data_dir`` lacks is
    fetched into it, unless ``fetch`` is false.

    Raises:
        DataError: the set is unknown, too small, or cannot be had; one line with the way out.
    """
    _check_name(name)
    known = idx.KNOWN_SETS.get(name)
    num_train = known.train_labels.shape[0] if known else synthetic.NUM_TRAIN
    num_test = known.test_labels.shape[0] if known else synthetic.NUM_TEST
    num_train = _cut(name, "train", train_samples, num_train)
    num_test = _cut(name, "test", test_samples, num_test)
    if known is None:
        train = synthetic.draw("train", num_train, seed)
        test = synthetic.draw("test", num_test, seed)
    else:
        raws = _fetch.obtain(known, data_dir, fetch=fetch)
        train = _first(num_train, known.train_images, raws), _first(num_train, known.train_labels, raws).long()
        test = _first(num_test, known.test_images, raws), _first(num_test, known.test_labels, raws).long()
    return Dataset(
        name=name,
        train_images=train[0],
        train_labels=train[1],
        test_images=test[0],
        test_labels=test[1],
        sha256=_digest(*train),
    )


def ensure(name: str, data_dir: Path) -> None:
    """Verify the files of a data set, and fetch what is missing; builds no tensor.

    Raises:
        DataError: the set is unknown or cannot be had.
    """
    _check_name(name)
    if name in idx.KNOWN_SETS:
        _fetch.obtain(idx.KNOWN_SETS[name], data_dir, fetch=True)


def _check_name(name: str) -> None:
    if name not in DATASETS:
        raise DataError(f"--dataset {name}: unknown; choose one of {', '.join(DATASETS)}")


def _cut(name: str, split: str, asked: int | None, held: int) -> int:
    option = f"--{split}_samples {asked}"
    if asked is None:
        return held
    if asked < 1:
        raise DataError(f"{option}: at least 1 sample is needed; leave the option out for all {held:,}")
    if asked > held:
        split_word = {"train": "training", "test": "test"}[split]
        raise DataError(f"{option}: {name} has {held:,} {split_word} samples; use at most that")
    return asked


def _first(num_samples: int, known: idx.KnownFile, raws: dict[str, bytearray]) -> Tensor:
    """Return the first samples of a verified file, ``(num_samples, ...)`` in uint8."""
    whole = torch.frombuffer(raws[known.name], dtype=torch.uint8, offset=len(known.header)).view(known.shape)
    # A slice would keep the whole file in memory for as long as it lives.
    return whole if num_samples == len(whole) else whole[:num_samples].clone()


def _digest(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.to(torch.uint8).numpy().data)
    return digest.hexdigest()

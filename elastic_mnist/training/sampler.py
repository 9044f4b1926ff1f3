"""Which samples a step uses, and who computes them: pure functions of (seed, epoch, position).

The order of an epoch is torch's `DistributedSampler`'s: `randperm` from a generator seeded with
seed + epoch. Position is counted in samples of the epoch, never per rank, so that any number of
ranks can go on where any other number stopped. Ranks only divide what is fixed: a step's samples,
their order and their cut into micro-batches do not depend on the world.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.data import Sampler


@dataclass(frozen=True, kw_only=True)
class Position:
    """What of the job is finished.

    Attributes:
        epoch: number of whole epochs finished.
        samples_in_epoch: number of samples used of the epoch after those.
        step: number of optimizer updates made since the job began.
    """

    epoch: int = 0
    samples_in_epoch: int = 0
    step: int = 0

    def after(self, step: "Step", num_samples: int) -> "Position":
        """Return the position once `step` is done, in a set of `num_samples`."""
        assert step.start == self.samples_in_epoch
        if step.stop == num_samples:
            return Position(epoch=self.epoch + 1, samples_in_epoch=0, step=self.step + 1)
        return replace(self, samples_in_epoch=step.stop, step=self.step + 1)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The unit of gradient work.

    Attributes:
        index: its place among the step's micro-batches.
        samples: (at most micro_batch_size,) int64 indices into the training set.
    """

    index: int
    samples: Tensor


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer update, as one rank sees it.

    Attributes:
        epoch: the epoch it belongs to.
        start: position in the epoch's order of its first sample.
        stop: position after its last sample.
        micro_batches: this rank's share; may be empty, and the rank takes part all the same.
    """

    epoch: int
    start: int
    stop: int
    micro_batches: tuple[MicroBatch, ...]

    @property
    def num_samples(self) -> int:
        """Samples of the step over all ranks."""
        return self.stop - self.start


def epoch_order(num_samples: int, seed: int, epoch: int) -> Tensor:
    """Return the order in which an epoch uses the samples: (num_samples,) int64."""
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed + epoch))


def num_steps_per_epoch(num_samples: int, global_batch_size: int) -> int:
    """Return the number of steps of an epoch; the last one may be short."""
    return -(-num_samples // global_batch_size)


def share(num_items: int, rank: int, world_size: int) -> range:
    """Return the contiguous run of items that falls to `rank`; lengths differ by one at most."""
    return range(num_items * rank // world_size, num_items * (rank + 1) // world_size)


class StepSampler(Sampler[Step]):
    """The steps of an epoch from a position in it onwards, as one rank sees them."""

    def __init__(
        self,
        num_samples: int,
        *,
        seed: int,
        epoch: int,
        start: int = 0,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
    ) -> None:
        """Args name the epoch, the sample in it to `start` at, and who looks."""
        self._num_samples = num_samples
        self._seed = seed
        self._epoch = epoch
        self._start = start
        self._global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._rank = rank
        self._world_size = world_size

    def __len__(self) -> int:
        return num_steps_per_epoch(self._num_samples - self._start, self._global_batch_size)

    def __iter__(self) -> Iterator[Step]:
        order = epoch_order(self._num_samples, self._seed, self._epoch)
        for start in range(self._start, self._num_samples, self._global_batch_size):
            stop = min(start + self._global_batch_size, self._num_samples)
            # The cut into micro-batches is the same for every rank; ranks take runs of it.
            pieces = order[start:stop].split(self._micro_batch_size)
            mine = share(len(pieces), self._rank, self._world_size)
            yield Step(
                epoch=self._epoch,
                start=start,
                stop=stop,
                micro_batches=tuple(MicroBatch(index=index, samples=pieces[index]) for index in mine),
            )

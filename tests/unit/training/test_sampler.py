"""Which samples a step uses: torch's own order, whole and once, whoever looks and wherever a run stopped."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, TensorDataset

from elastic_mnist.training.sampler import (
    MicroBatch,
    Position,
    Step,
    StepSampler,
    epoch_order,
    num_steps_per_epoch,
    share,
)

WORLD_SIZES = (1, 2, 3, 4)
BOUNDED = settings(max_examples=60, deadline=None)


def steps_of(
    world_size: int,
    rank: int,
    *,
    num_samples: int = 103,
    seed: int = 7,
    epoch: int = 2,
    start: int = 0,
    global_batch_size: int = 24,
    micro_batch_size: int = 5,
) -> list[Step]:
    """Return the steps of an epoch as one rank sees them."""
    sampler = StepSampler(
        num_samples,
        seed=seed,
        epoch=epoch,
        start=start,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        rank=rank,
        world_size=world_size,
    )
    return list(sampler)


def in_rank_order(views: Sequence[Step]) -> list[MicroBatch]:
    """Return the micro-batches of one step as the ranks take them, rank 0's first."""
    return [micro_batch for view in views for micro_batch in view.micro_batches]


def samples_of(micro_batches: Sequence[MicroBatch]) -> list[int]:
    """Return the samples of some micro-batches, in order."""
    return [sample for micro_batch in micro_batches for sample in micro_batch.samples.tolist()]


def torch_batches(
    num_samples: int, world_size: int, *, seed: int, epoch: int, global_batch_size: int
) -> list[set[int]]:
    """Return the samples of each step as torch's `DistributedSampler` deals them out, without its padding."""
    dataset = TensorDataset(torch.zeros(num_samples))
    per_rank = []
    for rank in range(world_size):
        sampler: DistributedSampler[int] = DistributedSampler(
            dataset, num_replicas=world_size, rank=rank, shuffle=True, seed=seed
        )
        sampler.set_epoch(epoch)
        # The k-th sample of a rank lies at position rank + k * world_size; what lies behind the set is padding.
        own = [index for k, index in enumerate(sampler) if rank + k * world_size < num_samples]
        per_rank.append(own)
    size = global_batch_size // world_size
    return [
        {index for own in per_rank for index in own[step * size : (step + 1) * size]}
        for step in range(num_steps_per_epoch(num_samples, global_batch_size))
    ]


@dataclass(frozen=True)
class Shape:
    """A job whose world changes: its numbers, and (world size, number of steps) of its lives; the last one goes on."""

    num_samples: int
    global_batch_size: int
    micro_batch_size: int
    lives: list[tuple[int, int]]

    def views(self, world_size: int, start: int) -> list[tuple[Step, ...]]:
        """Return each step from `start` on as all ranks see it."""
        ranks = (
            steps_of(
                world_size,
                rank,
                num_samples=self.num_samples,
                start=start,
                global_batch_size=self.global_batch_size,
                micro_batch_size=self.micro_batch_size,
            )
            for rank in range(world_size)
        )
        return list(zip(*ranks, strict=True))

    def run(self) -> list[tuple[Step, ...]]:
        """Return every step of the epoch over all lives, each as all ranks of its life see it."""
        made: list[tuple[Step, ...]] = []
        position = Position(epoch=2)
        for index, (world_size, num_steps) in enumerate(self.lives):
            limit = None if index == len(self.lives) - 1 else num_steps
            for views in islice(self.views(world_size, position.samples_in_epoch), limit):
                made.append(views)
                position = position.after(views[0], self.num_samples)
            if position.epoch > 2:
                break
        assert position.epoch == 3
        return made


SHAPES = st.builds(
    Shape,
    st.integers(1, 200),
    st.integers(1, 70),
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4)), min_size=1, max_size=5),
)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_each_step_uses_the_samples_that_torch_gives_its_ranks(world_size: int, epoch: int) -> None:
    """Step t covers the set of samples that DistributedSampler's ranks take as their t-th batches, at any world."""
    ours = [
        set(samples_of(in_rank_order(views)))
        for views in zip(*(steps_of(world_size, rank, epoch=epoch) for rank in range(world_size)), strict=True)
    ]
    assert ours == torch_batches(103, world_size, seed=7, epoch=epoch, global_batch_size=24)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_resume_in_mid_epoch_goes_on_with_the_samples_that_torch_would_take_next(world_size: int) -> None:
    """From sample 48 on, the steps are DistributedSampler's from its third batch on."""
    ours = [
        set(samples_of(in_rank_order(views)))
        for views in zip(*(steps_of(world_size, rank, start=48) for rank in range(world_size)), strict=True)
    ]
    assert ours == torch_batches(103, world_size, seed=7, epoch=2, global_batch_size=24)[2:]


def test_the_order_within_an_epoch_is_that_of_a_single_torch_sampler() -> None:
    """The samples of an epoch come in the very order of DistributedSampler with one replica."""
    peer: DistributedSampler[int] = DistributedSampler(
        TensorDataset(torch.zeros(103)), num_replicas=1, rank=0, shuffle=True, seed=7
    )
    peer.set_epoch(2)
    assert [sample for step in steps_of(1, 0) for sample in samples_of(step.micro_batches)] == list(peer)


@given(shape=SHAPES)
@BOUNDED
def test_the_samples_of_an_epoch_come_in_its_one_order_however_the_world_changes(shape: Shape) -> None:
    """Over all lives and ranks the epoch's samples come exactly once and in randperm's order, the tail included."""
    made = [sample for views in shape.run() for sample in samples_of(in_rank_order(views))]
    assert made == torch.randperm(shape.num_samples, generator=torch.Generator().manual_seed(7 + 2)).tolist()


@given(shape=SHAPES)
@BOUNDED
def test_the_cuts_into_micro_batches_do_not_depend_on_the_world(shape: Shape) -> None:
    """Each step has the same micro-batches, index and samples, as an undisturbed run of one process."""
    alone = Shape(shape.num_samples, shape.global_batch_size, shape.micro_batch_size, [(1, 0)])
    undisturbed = [[(m.index, m.samples.tolist()) for m in in_rank_order(views)] for views in alone.run()]
    assert [[(m.index, m.samples.tolist()) for m in in_rank_order(views)] for views in shape.run()] == undisturbed


@given(shape=SHAPES)
@BOUNDED
def test_all_ranks_see_the_same_steps(shape: Shape) -> None:
    """Epoch, start and stop of a step are the same at each rank, also where it has no micro-batch."""
    for views in shape.run():
        assert len({(view.epoch, view.start, view.stop) for view in views}) == 1


@given(shape=SHAPES)
@BOUNDED
def test_a_micro_batch_is_full_but_for_the_last_of_its_step(shape: Shape) -> None:
    """All micro-batches of a step have the wanted size, only the last one may be short, and none is empty."""
    for views in shape.run():
        *full, last = (len(m.samples) for m in in_rank_order(views))
        assert all(size == shape.micro_batch_size for size in full)
        assert 1 <= last <= shape.micro_batch_size


@given(shape=SHAPES)
@BOUNDED
def test_a_step_is_a_full_batch_but_for_the_last_of_its_epoch(shape: Shape) -> None:
    """Every step but the last has the global batch size, and the last one has the rest."""
    sizes = [views[0].num_samples for views in shape.run()]
    num_full, rest = divmod(shape.num_samples, shape.global_batch_size)
    assert sizes == [shape.global_batch_size] * num_full + ([rest] if rest else [])


def test_ranks_beyond_the_number_of_micro_batches_take_part_without_work() -> None:
    """With 6 ranks and 2 micro-batches a step, all 6 see each step, and 4 of them have nothing to compute."""
    ranks = [steps_of(6, rank, num_samples=20, global_batch_size=10, micro_batch_size=5) for rank in range(6)]
    assert [[len(step.micro_batches) for step in steps] for steps in zip(*ranks, strict=True)] == [
        [0, 0, 1, 0, 0, 1]
    ] * 2


def test_a_world_larger_than_the_data_set_uses_each_sample_once() -> None:
    """Three samples at seven ranks: each sample once."""
    ranks = [steps_of(7, rank, num_samples=3, global_batch_size=7, micro_batch_size=1) for rank in range(7)]
    assert sorted(samples_of(in_rank_order([steps[0] for steps in ranks]))) == [0, 1, 2]


@given(num_samples=st.integers(1, 300), batch=st.integers(1, 90), done=st.integers(0, 5))
@BOUNDED
def test_the_length_of_a_sampler_is_the_number_of_steps_it_gives(num_samples: int, batch: int, done: int) -> None:
    """len() counts the steps that are left of the epoch."""
    start = min(done * batch, num_samples)
    sampler = StepSampler(
        num_samples, seed=0, epoch=0, start=start, global_batch_size=batch, micro_batch_size=8, rank=0, world_size=1
    )
    assert len(sampler) == len(list(sampler))


@given(num_items=st.integers(0, 200), world_size=st.integers(1, 20))
@BOUNDED
def test_shares_divide_the_items_without_gap_or_overlap(num_items: int, world_size: int) -> None:
    """The ranks' runs, one after the other, are all items in order."""
    runs = [share(num_items, rank, world_size) for rank in range(world_size)]
    assert [item for run in runs for item in run] == list(range(num_items))


@given(num_items=st.integers(0, 200), world_size=st.integers(1, 20))
@BOUNDED
def test_shares_differ_by_one_item_at_most(num_items: int, world_size: int) -> None:
    """No rank has two items more than another."""
    lengths = [len(share(num_items, rank, world_size)) for rank in range(world_size)]
    assert max(lengths) - min(lengths) <= 1


def test_looking_at_an_order_leaves_the_process_random_state_alone() -> None:
    """The order draws from a generator of its own."""
    before = torch.get_rng_state()
    epoch_order(100, 0, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_step_within_an_epoch_moves_the_position_by_its_samples() -> None:
    """After a step that does not end the epoch, its stop is the position and one more step is finished."""
    step = Step(epoch=3, start=20, stop=30, micro_batches=())
    after = Position(epoch=3, samples_in_epoch=20, step=62).after(step, 35)
    assert after == Position(epoch=3, samples_in_epoch=30, step=63)


def test_the_last_step_of_an_epoch_moves_the_position_to_the_next_epoch() -> None:
    """After a step that ends the epoch the position is (epoch + 1, 0), and one more step is finished."""
    step = Step(epoch=3, start=30, stop=35, micro_batches=())
    after = Position(epoch=3, samples_in_epoch=30, step=63).after(step, 35)
    assert after == Position(epoch=4, samples_in_epoch=0, step=64)


def test_a_step_from_elsewhere_does_not_move_the_position() -> None:
    """A step that does not begin where the position stands is our own bug, and is caught."""
    with pytest.raises(AssertionError):
        Position(epoch=0, samples_in_epoch=10, step=1).after(Step(epoch=0, start=20, stop=30, micro_batches=()), 35)

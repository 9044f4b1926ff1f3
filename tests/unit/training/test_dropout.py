"""The randomness of a micro-batch: its coordinates alone decide it."""

import pytest
import torch
from builders import SEED, objective
from torch import Tensor, nn

from elastic_mnist.training.gradients import Objective, micro_batch_seed
from elastic_mnist.training.model import SeededDropout, build
from elastic_mnist.training.sampler import MicroBatch


def dropped(learned: Objective, micro_batch: MicroBatch, *, epoch: int = 0, step_index: int = 0) -> list[Tensor]:
    """Return what each dropout of a micro-batch's forward pass sets to zero."""
    masks: list[Tensor] = []

    def record(_module: nn.Module, inputs: tuple[Tensor, object], output: Tensor) -> None:
        masks.append((inputs[0] != 0) & (output == 0))

    layers = [module for module in learned.model.modules() if isinstance(module, SeededDropout)]
    hooks = [layer.register_forward_hook(record) for layer in layers]
    learned.loss(micro_batch, epoch=epoch, step_index=step_index)
    for hook in hooks:
        hook.remove()
    assert len(masks) == len(layers) == 2
    assert all(mask.any() for mask in masks)
    return masks


FIRST = MicroBatch(index=0, samples=torch.arange(4))
SECOND = MicroBatch(index=1, samples=torch.arange(4))


def test_micro_batches_of_a_step_have_different_dropout() -> None:
    """The same samples as another micro-batch of the step have another first mask."""
    learned = objective(build(SEED))
    assert not torch.equal(dropped(learned, FIRST)[0], dropped(learned, SECOND)[0])


@pytest.mark.parametrize(("epoch", "step_index"), [(1, 0), (0, 1)])
def test_epochs_and_steps_have_different_dropout(epoch: int, step_index: int) -> None:
    """The same micro-batch of another epoch or step has another first mask."""
    learned = objective(build(SEED))
    assert not torch.equal(dropped(learned, FIRST)[0], dropped(learned, FIRST, epoch=epoch, step_index=step_index)[0])


def test_equal_coordinates_have_equal_dropout() -> None:
    """A micro-batch's masks are the same again after another micro-batch and other draws of the process."""
    learned = objective(build(SEED))
    masks = dropped(learned, FIRST)
    dropped(learned, SECOND)
    with torch.random.fork_rng(devices=[]):
        torch.rand(1000)
        again = dropped(learned, FIRST)
    assert all(torch.equal(one, other) for one, other in zip(masks, again, strict=True))


def test_a_loss_leaves_the_process_random_state_alone() -> None:
    """Dropout draws from the micro-batch's own generator."""
    before = torch.get_rng_state()
    objective(build(SEED)).loss(FIRST, epoch=0, step_index=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_no_two_coordinates_share_a_seed() -> None:
    """All coordinates of a small job, and such as read alike without separators, have seeds of their own."""
    coordinates = [(s, e, t, m) for s in (0, 1, 11) for e in (0, 1, 11) for t in range(25) for m in range(12)]
    assert len({micro_batch_seed(*coordinate) for coordinate in coordinates}) == len(coordinates)


def test_a_seed_fits_a_generator() -> None:
    """Seeds lie in 0..2^63 - 1, which every torch generator takes."""
    assert all(0 <= micro_batch_seed(2**62, epoch, 10**9, 7) < 2**63 for epoch in range(500))

"""DDP's own gradient sum, the other choice of --gradient_sync, in a real gloo group of one process."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from builders import (
    BATCH,
    SEED,
    enlarge_loss,
    flat_gradient,
    objective,
    plain_gradient,
    poison,
    samples_of,
    step_of,
    without_dropout,
)
from torch import Tensor, nn

from elastic_mnist.training.allreduce import AllReduceGradient
from elastic_mnist.training.gradients import StepResult
from elastic_mnist.training.model import ConvNet, build
from elastic_mnist.training.sampler import Step
from elastic_mnist.worker.process_group import peer_errors

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """Let this process be a gloo group of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def all_reduce_in_group(tensor: Tensor) -> None:
    """Add up over this process's group."""
    dist.all_reduce(tensor)


def all_reduced(step: Step, model: ConvNet | None = None) -> tuple[StepResult, ConvNet]:
    """Make one step's gradient by DDP in this process's group, without dropout."""
    model = without_dropout(model or build(SEED))
    wrapped = nn.parallel.DistributedDataParallel(model)
    gradient = AllReduceGradient(
        replace(objective(model), model=wrapped), all_reduce_in_group, peer_errors, world_size=1
    )
    return gradient(step, step_index=3), model


@pytest.mark.parametrize("start", [0, BATCH], ids=["full", "short"])
def test_allreduce_gives_the_gradient_of_the_mean_loss_over_the_step(start: int) -> None:
    """DDP's gradient over several micro-batches equals plain autograd's over the step's samples."""
    _, model = all_reduced(step_of(start=start))
    _, plain = plain_gradient(samples_of(step_of(start=start)))
    torch.testing.assert_close(flat_gradient(model), plain, rtol=1e-4, atol=1e-6)


def test_allreduce_gives_the_loss_sum_over_the_step() -> None:
    """DDP's loss equals that of one plain forward pass."""
    result, _ = all_reduced(step_of())
    plain, _ = plain_gradient(samples_of(step_of()))
    assert result.loss_sum == pytest.approx(plain, rel=1e-5)


def test_allreduce_works_for_a_rank_without_micro_batches() -> None:
    """A rank with nothing to compute brings zeros for every parameter, and no loss."""
    result, model = all_reduced(Step(epoch=0, start=0, stop=BATCH, micro_batches=()))
    assert result == StepResult(loss_sum=0.0, num_bad=0)
    assert torch.count_nonzero(flat_gradient(model)) == 0
    assert flat_gradient(model).numel() == sum(parameter.numel() for parameter in model.parameters())


def test_allreduce_counts_a_gradient_that_is_not_finite() -> None:
    """Weights with a NaN make the step bad."""
    model = build(SEED)
    poison(model)
    result, _ = all_reduced(step_of(start=BATCH), model)
    assert result.num_bad == 1


def test_allreduce_counts_a_loss_that_is_not_finite() -> None:
    """A sum of losses beyond fp32 makes the step bad, finite as its gradient is."""
    model = build(SEED)
    enlarge_loss(model, 3e37)
    result, _ = all_reduced(step_of(), model)
    assert bool(flat_gradient(model).isfinite().all())
    assert result.num_bad > 0


def test_allreduce_sums_a_loss_that_is_huge() -> None:
    """A finite loss beyond the fixed point's limit is none of this sum's concern: it is told as it is."""
    model = build(SEED)
    enlarge_loss(model, 1e30)
    result, _ = all_reduced(step_of(), model)
    wanted = objective(model).labels[samples_of(step_of())].sum().item() * 1e30
    assert result.num_bad == 0
    assert result.loss_sum == pytest.approx(wanted, rel=1e-5)

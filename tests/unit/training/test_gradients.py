"""One gradient out of many micro-batches: the same bits however the work is divided, and the right ones."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from builders import (
    BATCH,
    MICRO_BATCH,
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
from torch import Tensor

from elastic_mnist.training.gradients import ExactGradient, StepResult
from elastic_mnist.training.model import ConvNet, build
from elastic_mnist.training.pool import MicroBatchPool


def bits(values: Tensor) -> Tensor:
    """Return a fp32 tensor's bits."""
    return values.view(torch.int32)


def poison_rank_0(rank: int, model: ConvNet) -> None:
    """Put a NaN into the weights of rank 0."""
    if rank == 0:
        poison(model)


def enlarge_loss_of_rank_0(rank: int, model: ConvNet) -> None:
    """Give rank 0 weights whose losses are finite, and beyond all that an int64 holds."""
    if rank == 0:
        enlarge_loss(model, 1e30)


class Ranks:
    """Ranks as threads of this process; their all-reduce adds the tensors they bring up, in the order of arrival."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._barrier = threading.Barrier(world_size, timeout=60)
        self._brought: list[Tensor] = []
        self._lock = threading.Lock()

    def all_reduce(self, tensor: Tensor) -> None:
        """Add up over the ranks, in place."""
        with self._lock:
            self._brought.append(tensor.clone())
        self._barrier.wait()
        total = torch.stack(self._brought).sum(dim=0)
        if self._barrier.wait() == 0:
            self._brought = []
        tensor.copy_(total)
        self._barrier.wait()

    def exact(
        self,
        *,
        num_threads: int = 1,
        precision: str = "fp32",
        start: int = 0,
        prepare: Callable[[int, ConvNet], object] = lambda _rank, _model: None,
    ) -> list[tuple[StepResult, Tensor]]:
        """Make one step's exact gradient at each rank; return what each of them got."""
        # Built here, one by one: `build` seeds torch's global generator for a moment, which threads share.
        models = [build(SEED) for _ in range(self.world_size)]

        def life(rank: int) -> tuple[StepResult, Tensor]:
            prepare(rank, models[rank])
            gradient = ExactGradient(
                objective(models[rank], precision),
                MicroBatchPool(num_threads),
                self.all_reduce,
                global_batch_size=BATCH,
                micro_batch_size=MICRO_BATCH,
            )
            result = gradient(step_of(rank, self.world_size, start=start), step_index=3)
            return result, flat_gradient(models[rank])

        with ThreadPoolExecutor(self.world_size) as pool:
            return list(pool.map(life, range(self.world_size)))


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def alone(request: pytest.FixtureRequest) -> tuple[str, StepResult, Tensor]:
    """Return a precision, and the step's result and gradient of one rank with one lane."""
    ((result, gradient),) = Ranks(1).exact(precision=request.param)
    return request.param, result, gradient


@pytest.mark.parametrize("num_threads", [2, 4])
def test_lanes_change_no_bit_of_the_gradient(alone: tuple[str, StepResult, Tensor], num_threads: int) -> None:
    """Any number of lanes gives the gradient of one lane, bit for bit."""
    precision, _, undivided = alone
    ((_, gradient),) = Ranks(1).exact(num_threads=num_threads, precision=precision)
    assert torch.equal(bits(gradient), bits(undivided))


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_a_split_over_ranks_changes_no_bit_of_the_gradient(
    alone: tuple[str, StepResult, Tensor], world_size: int
) -> None:
    """Every rank of any world gets the gradient of one process, bit for bit; at 7 ranks two have no work."""
    precision, _, undivided = alone
    for _, gradient in Ranks(world_size).exact(precision=precision):
        assert torch.equal(bits(gradient), bits(undivided))


def test_a_split_over_ranks_and_lanes_changes_no_bit_of_the_gradient(alone: tuple[str, StepResult, Tensor]) -> None:
    """Two ranks of two lanes get the gradient of one process with one lane, bit for bit."""
    precision, _, undivided = alone
    for _, gradient in Ranks(2).exact(num_threads=2, precision=precision):
        assert torch.equal(bits(gradient), bits(undivided))


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_a_split_over_ranks_changes_nothing_of_the_result(
    alone: tuple[str, StepResult, Tensor], world_size: int
) -> None:
    """Every rank of any world gets the result of one process, the loss to its last bit."""
    precision, undivided, _ = alone
    assert [result for result, _ in Ranks(world_size).exact(precision=precision)] == [undivided] * world_size


@pytest.mark.parametrize("start", [0, BATCH], ids=["full", "short"])
def test_the_gradient_is_that_of_the_mean_loss_over_the_step(start: int) -> None:
    """Without dropout it equals plain autograd's over the step's samples, also in the short last step."""
    ((_, gradient),) = Ranks(1).exact(start=start, prepare=lambda _rank, model: without_dropout(model))
    _, plain = plain_gradient(samples_of(step_of(start=start)))
    torch.testing.assert_close(gradient, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("start", [0, BATCH], ids=["full", "short"])
def test_the_loss_is_the_sum_over_the_samples_of_the_step(start: int) -> None:
    """Without dropout it equals that of one plain forward pass."""
    ((result, _),) = Ranks(1).exact(start=start, prepare=lambda _rank, model: without_dropout(model))
    plain, _ = plain_gradient(samples_of(step_of(start=start)))
    assert result.loss_sum == pytest.approx(plain, rel=1e-5)


def test_each_step_begins_a_sum_of_its_own() -> None:
    """The same step computed twice by one object gives the same bits: nothing of the first is left."""
    model = build(SEED)
    gradient = ExactGradient(
        objective(model), MicroBatchPool(1), lambda _: None, global_batch_size=BATCH, micro_batch_size=MICRO_BATCH
    )
    first, first_gradient = gradient(step_of(), step_index=3), flat_gradient(model)
    second, second_gradient = gradient(step_of(), step_index=3), flat_gradient(model)
    assert first == second
    assert torch.equal(bits(first_gradient), bits(second_gradient))


def test_another_step_index_draws_other_dropout() -> None:
    """The same samples at another step give another gradient, as their dropout is another."""
    model = build(SEED)
    gradient = ExactGradient(
        objective(model), MicroBatchPool(1), lambda _: None, global_batch_size=BATCH, micro_batch_size=MICRO_BATCH
    )
    gradient(step_of(), step_index=3)
    first = flat_gradient(model)
    gradient(step_of(), step_index=4)
    assert not torch.equal(first, flat_gradient(model))


def test_a_gradient_that_is_not_finite_at_one_rank_is_known_to_all() -> None:
    """Both micro-batches of a rank whose weights hold a NaN are counted at each rank, and nobody else's."""
    num_poisoned = len(step_of(0, 2).micro_batches)
    assert num_poisoned == 2
    assert [result.num_bad for result, _ in Ranks(2).exact(prepare=poison_rank_0)] == [num_poisoned] * 2


def test_a_loss_that_is_huge_at_one_rank_is_known_to_all() -> None:
    """Finite losses beyond the fixed point's limit are counted, one a micro-batch, at each rank, and nobody else's."""
    num_huge = len(step_of(0, 2).micro_batches)
    assert num_huge == 2
    (first, gradient), (second, _) = Ranks(2).exact(prepare=enlarge_loss_of_rank_0)
    assert bool(gradient.isfinite().all())
    assert first == second
    assert first.num_bad == num_huge


def test_a_loss_that_is_huge_is_not_part_of_the_sum() -> None:
    """With one rank's losses beyond the limit, the loss told is that of the other rank's micro-batches alone."""
    gradient = ExactGradient(
        objective(build(SEED)), MicroBatchPool(1), lambda _: None, global_batch_size=BATCH, micro_batch_size=MICRO_BATCH
    )
    alone = gradient(step_of(1, 2), step_index=3)
    assert [result.loss_sum for result, _ in Ranks(2).exact(prepare=enlarge_loss_of_rank_0)] == [alone.loss_sum] * 2


def test_a_gradient_that_is_not_finite_leaves_the_others_as_they_are() -> None:
    """With one rank's micro-batches bad, the gradient is that of the other rank's alone, finite throughout."""
    step, model = step_of(1, 2), build(SEED)
    gradient = ExactGradient(
        objective(model), MicroBatchPool(1), lambda _: None, global_batch_size=BATCH, micro_batch_size=MICRO_BATCH
    )
    gradient(step, step_index=3)

    for _, found in Ranks(2).exact(prepare=poison_rank_0):
        assert torch.equal(bits(found), bits(flat_gradient(model)))


def test_a_finite_step_has_no_bad_micro_batch(alone: tuple[str, StepResult, Tensor]) -> None:
    """A usual step counts none."""
    assert alone[1].num_bad == 0

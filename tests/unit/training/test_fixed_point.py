"""The fixed-point sum: no order, no overflow, nothing that is not finite, and an error below its bound."""

import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from elastic_mnist.training.fixed_point import (
    LOSS_EXPONENT,
    MEAN_LIMIT_BITS,
    FixedPointSum,
    choose_exponent,
    error_bound,
    loss_from_fixed,
    loss_to_fixed,
    to_float,
)

BOUNDED = settings(max_examples=100, deadline=None)
MICRO_BATCH = 64
LIMIT = MICRO_BATCH * 2.0**MEAN_LIMIT_BITS
LOSS_LIMIT = 2.0**22
NUM_VALUES = 150_000  # more than two blocks, the last one short


@st.composite
def vectors(draw: st.DrawFn) -> list[list[Tensor]]:
    """Draw one to ten vectors of the same pieces, their values between 1e-30 and 1e3 in magnitude or zero."""
    shapes = draw(st.lists(st.sampled_from([(1,), (3,), (2, 3), (2, 1, 2), ()]), min_size=1, max_size=3))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    low = draw(st.integers(-30, 3))
    high = draw(st.integers(low, 3))

    def piece(shape: tuple[int, ...]) -> Tensor:
        exponents = torch.rand(shape, generator=random, dtype=torch.float64) * (high - low) + low
        signs = torch.randint(-1, 2, shape, generator=random)
        return (signs * 10**exponents).float()

    return [[piece(shape) for shape in shapes] for _ in range(draw(st.integers(1, 10)))]


def flat(pieces: list[Tensor]) -> Tensor:
    """Return the vector that the pieces form."""
    return torch.cat([piece.flatten() for piece in pieces])


class Sum(FixedPointSum):
    """Takes vectors as they are, and scales them as the backward pass does."""

    def __init__(self, *sizes: int, exponent: int, limit: float) -> None:
        super().__init__(torch.zeros(sum(sizes), dtype=torch.int64), sizes, limit=limit * 2.0**exponent)
        self._factor = 2.0**exponent

    def add_all(self, vectors: Sequence[Sequence[Tensor]]) -> list[bool]:
        """Add vectors; return which were fit."""
        return super().add_all([[piece * self._factor for piece in pieces] for pieces in vectors])

    def add(self, pieces: Sequence[Tensor]) -> bool:
        """Add the vector that the flattened pieces form; return whether it was fit."""
        (is_fit,) = self.add_all([pieces])
        return is_fit


def sizes_of(pieces: list[Tensor]) -> list[int]:
    """Return the number of values of each piece."""
    return [piece.numel() for piece in pieces]


def sum_of(items: list[list[Tensor]], exponent: int) -> Sum:
    """Add up vectors in the order given."""
    total = Sum(*sizes_of(items[0]), exponent=exponent, limit=LIMIT)
    assert all(total.add(pieces) for pieces in items)
    return total


@given(items=vectors())
@BOUNDED
def test_the_sum_is_the_exact_sum_within_its_error_bound(items: list[list[Tensor]]) -> None:
    """Each element is off from the exact sum of the fp32 values by less than the bound, in rational arithmetic."""
    exponent = choose_exponent(MICRO_BATCH, len(items))
    bound = Fraction(error_bound(MICRO_BATCH, len(items), num_samples=1))
    exact = [sum(map(Fraction, column)) for column in zip(*(flat(pieces).tolist() for pieces in items), strict=True)]
    found = [Fraction(value, 2**exponent) for value in sum_of(items, exponent).total.tolist()]
    assert all(abs(one - other) < bound for one, other in zip(found, exact, strict=True))


@given(items=vectors())
@BOUNDED
def test_the_mean_is_the_fp64_mean_within_its_error_bound(items: list[list[Tensor]]) -> None:
    """Each element of the mean is off from the correctly rounded fp64 sum's by the bound and fp64's own rounding."""
    exponent, num_samples = choose_exponent(MICRO_BATCH, len(items)), 512
    bound = error_bound(MICRO_BATCH, len(items), num_samples)
    columns = zip(*(flat(pieces).tolist() for pieces in items), strict=True)
    exact = torch.tensor([math.fsum(column) / num_samples for column in columns], dtype=torch.float64)
    found = sum_of(items, exponent).total.double() * (2.0**-exponent / num_samples)
    assert bool(((found - exact).abs() <= bound + exact.abs() * 2.0**-50).all())


@given(items=vectors(), data=st.data())
@BOUNDED
def test_the_order_of_the_vectors_changes_no_bit(items: list[list[Tensor]], data: st.DataObject) -> None:
    """Any permutation gives the same integers."""
    exponent = choose_exponent(MICRO_BATCH, len(items))
    shuffled = data.draw(st.permutations(items))
    assert torch.equal(sum_of(shuffled, exponent).total, sum_of(items, exponent).total)


@given(items=vectors(), data=st.data())
@BOUNDED
def test_a_split_over_several_sums_changes_no_bit(items: list[list[Tensor]], data: st.DataObject) -> None:
    """Vectors dealt out to three sums in any way, and these added up, give the same integers."""
    exponent = choose_exponent(MICRO_BATCH, len(items))
    parts = [Sum(*sizes_of(items[0]), exponent=exponent, limit=LIMIT) for _ in range(3)]
    for pieces in items:
        parts[data.draw(st.integers(0, 2))].add(pieces)
    assert torch.equal(parts[2].total + parts[0].total + parts[1].total, sum_of(items, exponent).total)


@given(micro_batch=st.integers(1, 2**16), num_micro_batches=st.integers(1, 2**16))
@BOUNDED
def test_the_exponent_leaves_room_for_all_micro_batches(micro_batch: int, num_micro_batches: int) -> None:
    """M values at the limit of 2^10 b, scaled, stay within 2^62, half of what an int64 holds."""
    scale = Fraction(2) ** choose_exponent(micro_batch, num_micro_batches)
    assert num_micro_batches * 2**MEAN_LIMIT_BITS * micro_batch * scale <= 2**62


@given(micro_batch=st.integers(1, 2**16), num_micro_batches=st.integers(1, 2**16))
@BOUNDED
def test_the_exponent_is_the_largest_that_leaves_room(micro_batch: int, num_micro_batches: int) -> None:
    """One more would pass 2^62: no useful bit is given away."""
    scale = Fraction(2) ** (choose_exponent(micro_batch, num_micro_batches) + 1)
    assert num_micro_batches * 2**MEAN_LIMIT_BITS * micro_batch * scale > 2**62


def test_the_defaults_have_the_exponent_that_the_documentation_states() -> None:
    """Micro-batches of 64, 8 of them: exponent 43, and an error of the mean below 1.9e-15."""
    assert choose_exponent(64, 8) == 43
    assert error_bound(64, 8, 512) < 1.9e-15


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("micro_batch", "num_micro_batches"), [(1, 1), (4, 5), (64, 8), (64, 1000), (512, 3)])
def test_vectors_at_the_limit_do_not_overflow(micro_batch: int, num_micro_batches: int, sign: int) -> None:
    """M times the largest fp32 value below the limit adds up to the sum in Python's unbounded integers."""
    exponent = choose_exponent(micro_batch, num_micro_batches)
    limit = micro_batch * 2.0**MEAN_LIMIT_BITS
    value = sign * torch.nextafter(torch.tensor(limit), torch.tensor(0.0))
    total = Sum(1, exponent=exponent, limit=limit)
    assert all(total.add([value]) for _ in range(num_micro_batches))
    assert total.total.item() == num_micro_batches * int(Fraction(value.item()) * 2**exponent)


@given(values=st.lists(st.integers(-(2**62), 2**62), min_size=1), num_samples=st.integers(1, 10**5))
@BOUNDED
def test_the_way_back_rounds_once(values: list[int], num_samples: int) -> None:
    """Each element is off from the exact mean by one rounding of fp32, give or take those of fp64."""
    out = torch.empty(len(values))
    to_float(torch.tensor(values), 2.0**-43 / num_samples, out)
    for value, found in zip(values, out.tolist(), strict=True):
        exact = Fraction(value, 2**43 * num_samples)
        assert abs(Fraction(found) - exact) <= abs(exact) * Fraction(2**20 + 1, 2**44)


@pytest.mark.parametrize("place", [0, 1, NUM_VALUES - 1])
@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, LIMIT, -2 * LIMIT, 1e20, 3.4e38],
    ids=["nan", "inf", "-inf", "at the limit", "beyond it", "no int64", "largest"],
)
def test_a_vector_that_is_not_fit_is_told_and_not_added(value: float, place: int) -> None:
    """With NaN, infinity or a value at or beyond the limit anywhere, it is refused whole, and the sum is as it was."""
    total = Sum(NUM_VALUES, exponent=43, limit=LIMIT)
    assert total.add([torch.full((NUM_VALUES,), 1 / 3)])
    before = total.total.clone()
    vector = torch.full((NUM_VALUES,), -0.1)
    vector[place] = value
    assert not total.add([vector])
    assert torch.equal(total.total, before)


def test_the_limit_is_on_each_value() -> None:
    """A vector of which each value is within the limit is added, whatever its norm."""
    total = Sum(100, exponent=43, limit=LIMIT)
    assert total.add([torch.full((100,), LIMIT * 0.75)])
    assert total.total.tolist() == [int(LIMIT * 0.75 * 2**43)] * 100


@pytest.mark.parametrize("place", [0, NUM_VALUES - 1])
def test_a_sum_begins_after_a_bad_vector(place: int) -> None:
    """What comes after a bad vector, the first of a step that is not the first, counts as if it had never come."""
    disturbed, quiet = (Sum(NUM_VALUES, exponent=43, limit=LIMIT) for _ in range(2))
    assert disturbed.add([torch.full((NUM_VALUES,), 7.0)])
    disturbed.clear()
    vector = torch.full((NUM_VALUES,), 0.5)
    vector[place] = math.nan
    assert not disturbed.add([vector])
    for total in (disturbed, quiet):
        total.add([torch.linspace(-3, 3, NUM_VALUES)])
    assert torch.equal(disturbed.total, quiet.total)


def test_a_sum_of_bad_vectors_alone_is_zero() -> None:
    """Nothing fit, nothing added; nor is anything left of the step before."""
    total = Sum(NUM_VALUES, exponent=43, limit=LIMIT)
    assert total.add([torch.full((NUM_VALUES,), 7.0)])
    total.clear()
    vector = torch.ones(NUM_VALUES)
    vector[-1] = math.inf
    assert not total.add([vector])
    assert not total.total.any()


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("place", [0, NUM_VALUES - 1])
def test_bad_vectors_among_those_added_at_once_are_left_out(place: int, *, is_first: bool) -> None:
    """Of four vectors given at once, those that are fit are added, and nothing of the others, in any block."""
    together, alone = (Sum(NUM_VALUES, exponent=43, limit=LIMIT) for _ in range(2))
    if not is_first:
        assert together.add([torch.linspace(-3, 3, NUM_VALUES)])
        assert alone.add([torch.linspace(-3, 3, NUM_VALUES)])
    items = [[torch.full((NUM_VALUES,), value)] for value in (0.1, -0.7, 1e-9, 30.0)]
    items[0][0][place] = math.nan
    items[2][0][place] = -math.inf
    assert together.add_all(items) == [False, True, False, True]
    assert alone.add(items[1])
    assert alone.add(items[3])
    assert torch.equal(together.total, alone.total)


@given(items=vectors(), data=st.data())
@BOUNDED
def test_how_many_are_added_at_once_changes_no_bit(items: list[list[Tensor]], data: st.DataObject) -> None:
    """Vectors added in groups of any size give the integers of one after the other."""
    exponent = choose_exponent(MICRO_BATCH, len(items))
    total, rest = Sum(*sizes_of(items[0]), exponent=exponent, limit=LIMIT), items
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        assert total.add_all(rest[:size]) == [True] * size
        rest = rest[size:]
    assert torch.equal(total.total, sum_of(items, exponent).total)


class AcceleratorSum(Sum):
    """Adds in the way of an accelerator, on a CPU."""

    _add_on_cpu = FixedPointSum._add_on_accelerator


@given(items=vectors())
@BOUNDED
def test_an_accelerator_adds_the_same_integers(items: list[list[Tensor]]) -> None:
    """The way without blocks and without numpy gives the bits of the other, also around a bad vector."""
    exponent = choose_exponent(MICRO_BATCH, len(items))
    total = AcceleratorSum(*sizes_of(items[0]), exponent=exponent, limit=LIMIT)
    bad = [torch.full_like(piece, math.nan) for piece in items[0]]
    assert not total.add(bad)
    assert all(total.add(pieces) for pieces in items)
    assert not total.add(bad)
    assert torch.equal(total.total, sum_of(items, exponent).total)


def test_threads_that_add_at_once_lose_nothing() -> None:
    """Four threads with four vectors each give the sum that one thread gives, one vector of a thread being bad."""
    random = torch.Generator().manual_seed(3)
    items = [[torch.randn(NUM_VALUES, generator=random)] for _ in range(16)]
    for bad in range(0, 16, 4):
        items[bad][0][-1] = math.nan
    together, alone = (Sum(NUM_VALUES, exponent=41, limit=LIMIT) for _ in range(2))
    barrier = threading.Barrier(4, timeout=60)

    def add(thread: int) -> list[bool]:
        barrier.wait()
        return [together.add(pieces) for pieces in items[4 * thread : 4 * thread + 4]]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(add, range(4))) == [[False, True, True, True]] * 4
    for pieces in items:
        alone.add(pieces)
    assert torch.equal(together.total, alone.total)


def test_a_cleared_sum_is_empty() -> None:
    """After clear nothing is left of the values."""
    total = Sum(2, exponent=43, limit=LIMIT)
    total.add([torch.tensor([1.0, 2.0])])
    assert total.total.any()
    total.clear()
    assert not total.total.any()


@given(loss=st.floats(-LOSS_LIMIT, LOSS_LIMIT, exclude_min=True, exclude_max=True))
@BOUNDED
def test_a_loss_within_the_limit_is_off_by_half_a_unit_at_most(loss: float) -> None:
    """Whatever a loss below 2^22, its integer stands for it to 2^-25."""
    fixed = loss_to_fixed(loss)
    assert fixed is not None
    assert abs(Fraction(fixed, 2**LOSS_EXPONENT) - Fraction(loss)) <= Fraction(1, 2 ** (LOSS_EXPONENT + 1))


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_loss_below_the_limit_has_its_place(sign: int) -> None:
    """The last float before 2^22 is an integer of 2^46, its neighbours' nearest."""
    assert loss_to_fixed(sign * math.nextafter(LOSS_LIMIT, 0.0)) == sign * 2**46


@pytest.mark.parametrize(
    "loss",
    [LOSS_LIMIT, -LOSS_LIMIT, math.nextafter(LOSS_LIMIT, math.inf), 3.4e38, 1.7e308, math.inf, -math.inf, math.nan],
)
def test_a_loss_without_a_place_is_none(loss: float) -> None:
    """At the limit and beyond it, infinite or not a number: None, and no error of Python's."""
    assert loss_to_fixed(loss) is None


@pytest.mark.parametrize("sign", [1, -1])
def test_losses_at_the_limit_do_not_overflow(sign: int) -> None:
    """2^16 of the largest, more than MNIST has samples, add up within an int64."""
    largest = loss_to_fixed(sign * math.nextafter(LOSS_LIMIT, 0.0))
    assert largest is not None
    total = 2**16 * largest
    assert -(2**63) <= total < 2**63
    assert loss_from_fixed(total) == sign * 2**16 * LOSS_LIMIT


@given(losses=st.lists(st.floats(0.0, 100.0), max_size=20))
@BOUNDED
def test_a_sum_of_losses_comes_back(losses: list[float]) -> None:
    """What a sum of integers stands for is off from the exact sum by half a unit a loss at most."""
    total = loss_from_fixed(sum(fixed for fixed in map(loss_to_fixed, losses) if fixed is not None))
    exact = sum(map(Fraction, losses))
    assert abs(Fraction(total) - exact) <= Fraction(len(losses), 2 ** (LOSS_EXPONENT + 1))

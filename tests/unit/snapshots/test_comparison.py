"""Comparing two snapshots: equal or different, by the bits that training resumes from."""

import math
from typing import Any

import pytest
import torch
from states import changed, small_state
from torch import Tensor

from elastic_mnist.snapshots.comparison import Difference, compare
from elastic_mnist.snapshots.state import State

VALUES = (1.0, -2.5, 0.25, 3.0, 0.0, 7.5)


def state_with(*values: float, **changes: Any) -> State:  # noqa: ANN401 - what `small_state` takes
    """Return a small state whose weight, of shape (2, 3), has these values."""
    return small_state(5, model={"weight": torch.tensor(values or VALUES).reshape(2, 3)}, **changes)


def differ(ours: State, theirs: State) -> Difference:
    """Return the difference of two states that differ, and assert that it is the same from both sides."""
    there, back = compare(ours, theirs), compare(theirs, ours)
    assert there is not None
    assert back is not None
    assert (there.key, there.index, there.num_keys) == (back.key, back.index, back.num_keys)
    assert there.ours is back.theirs or there.ours == back.theirs or math.isnan(float(str(there.ours)))
    return there


def test_the_first_of_several_keys() -> None:
    """The keys that differ are counted; the first one is told, the largest difference is over all of them."""
    moments = [{"state": {0: {"step": torch.tensor(5.0), "exp_avg": torch.tensor([0.5, last])}}} for last in (1.0, 9.0)]
    difference = differ(
        state_with(optimizer=moments[0]), state_with(1.0, -2.0, *VALUES[2:], optimizer=moments[1], samples_in_epoch=48)
    )
    assert (difference.key, difference.index, difference.ours, difference.theirs) == ("model/weight", (0, 1), -2.5, -2)
    assert (difference.num_keys, difference.largest) == (3, 8.0)


def test_a_tensor_without_dimensions() -> None:
    """Adam's count of steps, a tensor of no dimension, is compared like any other."""
    optimizers = [{"state": {0: {"step": torch.tensor(count)}}} for count in (5.0, 6.0)]
    difference = differ(*(state_with(optimizer=optimizer) for optimizer in optimizers))
    assert difference.key == "optimizer/state/0/step"
    assert (difference.index, difference.ours, difference.theirs, difference.largest) == ((), 5.0, 6.0, 1.0)


@pytest.mark.parametrize("field", ["epoch", "step", "samples_in_epoch"])
def test_a_position(field: str) -> None:
    """A position that differs is told by its field and both numbers."""
    difference = differ(state_with(), changed(state_with(), **{field: 99}))
    assert (difference.key, difference.theirs, difference.num_keys, difference.largest) == (field, 99, 1, None)


def test_the_sign_of_a_zero() -> None:
    """-0.0 and 0.0 are different bits, and the index is told."""
    difference = differ(state_with(), state_with(1.0, -2.5, 0.25, 3.0, -0.0, 7.5))
    assert (difference.key, difference.index, difference.num_keys) == ("model/weight", (1, 1), 1)
    assert (str(difference.ours), str(difference.theirs)) == ("0.0", "-0.0")


def _bits(*patterns: int) -> Tensor:
    return torch.tensor(patterns, dtype=torch.int32).view(torch.float32)


QUIET, PAYLOAD = 0x7FC00000, 0x7FC00001


def test_the_same_nan() -> None:
    """NaN of the same bits is equal to itself."""
    states = [small_state(5, model={"weight": _bits(QUIET, PAYLOAD)}) for _ in range(2)]
    assert compare(*states) is None


def test_another_nan() -> None:
    """NaN of other bits is different."""
    difference = compare(*(small_state(5, model={"weight": _bits(QUIET, last)}) for last in (QUIET, PAYLOAD)))
    assert difference is not None
    assert (difference.key, difference.index) == ("model/weight", (1,))


@pytest.mark.parametrize(
    "other",
    [torch.tensor(VALUES), torch.tensor(VALUES).double().reshape(2, 3), torch.tensor(VALUES).reshape(3, 2)],
    ids=["flat", "double", "turned"],
)
def test_another_shape_or_type(other: Tensor) -> None:
    """The same numbers in another shape or type are different, and both are told."""
    difference = differ(state_with(), small_state(5, model={"weight": other}))
    assert (difference.key, difference.index) == ("model/weight", ())
    assert difference.ours == "torch.float32 of shape (2, 3)"
    assert difference.theirs == f"{other.dtype} of shape {tuple(other.shape)}"


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(2),
        False,
        None,
    ],
    ids=["tensor", "false", "none"],
)
def test_a_key_that_only_one_has(value: object) -> None:
    """A key that one of two lacks is a difference, whatever its value is."""
    ours = state_with()
    theirs = state_with(optimizer={**ours["optimizer"], "more": value})
    assert differ(ours, theirs).key == "optimizer/more"


@pytest.mark.parametrize(("ours", "theirs", "is_same"), [(0.0, -0.0, False), (math.nan, math.nan, True)])
def test_plain_numbers_by_their_bits(ours: float, theirs: float, is_same: bool) -> None:
    """A learning rate is compared by its bits, as a tensor's element is."""
    states = [state_with(optimizer={"param_groups": [{"lr": lr}]}) for lr in (ours, float(str(theirs)))]
    assert (compare(*states) is None) is is_same

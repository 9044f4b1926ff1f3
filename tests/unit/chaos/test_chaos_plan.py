"""The plan of `elastic-mnist chaos`: a pure function of the seed, and one that the job can survive."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_mnist.chaos.plan import KINDS, Fault, Shape, generate
from elastic_mnist.errors import UsageError
from elastic_mnist.training.trainer import MAX_SKIPPED_STEPS

ALL = tuple(KINDS)

shapes = st.builds(
    Shape,
    num_steps=st.integers(60, 400),
    first_damage_step=st.integers(1, 40),
    num_processes=st.integers(1, 4),
    max_nodes=st.integers(1, 3),
)
# Each set has a kind that is possible in every state of a job.
some_kinds = st.sets(st.sampled_from(ALL)).map(lambda kinds: tuple(sorted({*kinds, "kill"})))
seeds = st.integers(0, 2**62)
nums_faults = st.integers(1, 50)


def worlds(faults: tuple[Fault, ...]) -> list[int]:
    """Return the number of nodes that there are when each fault comes."""
    num_nodes, found = 1, []
    for fault in faults:
        found.append(num_nodes)
        num_nodes += {"grow": 1, "shrink": -1}.get(fault.kind, 0)
    return found


@given(seeds, some_kinds, nums_faults, shapes)
def test_a_seed_gives_one_plan(seed: int, kinds: tuple[str, ...], num_faults: int, shape: Shape) -> None:
    """Asked twice, the same seed and options give the same faults at the same coordinates."""
    assert generate(seed, kinds, num_faults, shape) == generate(seed, kinds, num_faults, shape)


def test_a_seed_gives_one_plan_in_every_process() -> None:
    """Other processes, with other hash seeds, draw the plan that stands here, whatever machine or Python that was."""
    program = (
        "from elastic_mnist.chaos.plan import *; "
        "print([(f.kind, f.step, *f.ranks) for f in generate(7, ('kill', 'raise', 'exit', 'killall'), 4, "
        "Shape(num_steps=126, first_damage_step=20, num_processes=2, max_nodes=2))])"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert told == {"[('exit', 7, 0), ('raise', 16, 0), ('kill', 36, 0), ('killall', 74, 0, 1)]\n"}


def test_seeds_differ() -> None:
    """A hundred seeds give a hundred plans."""
    shape = Shape(num_steps=126, first_damage_step=20, num_processes=2, max_nodes=2)
    assert len({generate(seed, ALL, 5, shape) for seed in range(100)}) == 100


@given(seeds, some_kinds, nums_faults, shapes)
def test_faults_have_coordinates_inside_the_job(
    seed: int, kinds: tuple[str, ...], num_faults: int, shape: Shape
) -> None:
    """As many faults as asked for, of the kinds asked for, steps ascending; the job's last tenth is left in peace."""
    faults = generate(seed, kinds, num_faults, shape)
    steps = [fault.step for fault in faults]
    assert len(faults) == num_faults
    assert {fault.kind for fault in faults} <= set(kinds)
    assert steps == sorted(set(steps))
    assert steps[0] >= 0
    assert steps[-1] < shape.num_steps * 9 / 10


@given(seeds, some_kinds, nums_faults, shapes)
def test_faults_befall_ranks_that_are_there(seed: int, kinds: tuple[str, ...], num_faults: int, shape: Shape) -> None:
    """Every rank of a fault exists with the nodes of that moment, and these are never more than asked for, or none."""
    faults = generate(seed, kinds, num_faults, shape)
    for fault, num_nodes in zip(faults, worlds(faults), strict=True):
        assert 1 <= num_nodes <= shape.max_nodes
        assert fault.ranks
        assert set(fault.ranks) <= set(range(num_nodes * shape.num_processes))


@given(seeds, nums_faults, shapes)
def test_what_a_fault_needs_is_there(seed: int, num_faults: int, shape: Shape) -> None:
    """A snapshot is there to be damaged; the node that leaves is not the first; the first one's agent ends alone."""
    faults = generate(seed, ALL, num_faults, shape)
    for fault, num_nodes in zip(faults, worlds(faults), strict=True):
        if fault.kind == "damage":
            assert fault.step >= shape.first_damage_step
            assert 0 <= fault.argument < 1000
        if KINDS[fault.kind].is_end_of_agent or fault.kind == "termall":
            assert num_nodes == 1
        if fault.kind == "term" and num_nodes > 1:
            assert fault.ranks[0] >= shape.num_processes
        if fault.kind == "shrink":
            assert fault.ranks == ((num_nodes - 1) * shape.num_processes,)
        if fault.kind == "killall":
            first = fault.ranks[0]
            assert first % shape.num_processes == 0
            assert fault.ranks == tuple(range(first, first + shape.num_processes))
        if fault.kind == "exit":
            assert fault.argument in {0, 1}


@given(seeds, nums_faults, shapes)
def test_no_more_batches_are_poisoned_than_the_trainer_skips(seed: int, num_faults: int, shape: Shape) -> None:
    """A plan never asks for more skipped steps than a job is promised to survive."""
    faults = generate(seed, ("nan", "kill"), num_faults, shape)
    assert sum(fault.kind == "nan" for fault in faults) <= MAX_SKIPPED_STEPS


@given(seeds)
def test_each_kind_comes_before_any_comes_twice(seed: int) -> None:
    """Among as many faults as there are kinds that are always possible, each is there once."""
    kinds = ("kill", "killall", "raise", "exit", "term", "stop", "spin")
    shape = Shape(num_steps=126, first_damage_step=20, num_processes=2, max_nodes=1)
    faults = generate(seed, kinds, 2 * len(kinds), shape)
    assert {fault.kind for fault in faults[: len(kinds)]} == set(kinds)
    assert {fault.kind for fault in faults[len(kinds) :]} == set(kinds)


@pytest.mark.parametrize(
    ("kinds", "num_faults", "message"),
    [
        (("shrink",), 1, r"--kinds shrink: none of them is possible at step \d+ with 1 of at most 2 nodes"),
        (("grow",), 2, r"--kinds grow: none of them is possible at step \d+ with 2 of at most 2 nodes"),
        (("kill",), 114, r"--faults 114: the job has 113 steps for them"),
    ],
)
def test_what_cannot_be_planned_is_a_usage_error(kinds: tuple[str, ...], num_faults: int, message: str) -> None:
    """Kinds that do not fit the job, and more faults than steps, are named, with the limit."""
    shape = Shape(num_steps=126, first_damage_step=20, num_processes=2, max_nodes=2)
    with pytest.raises(UsageError, match=message):
        generate(1, kinds, num_faults, shape)


@given(seeds, some_kinds, nums_faults, shapes)
def test_a_plan_survives_its_file(seed: int, kinds: tuple[str, ...], num_faults: int, shape: Shape) -> None:
    """What is written for the workers is read back as the same faults."""
    faults = generate(seed, kinds, num_faults, shape)
    assert tuple(Fault.from_plain(fault.to_plain()) for fault in faults) == faults

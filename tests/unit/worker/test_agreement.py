"""How rank 0's decision reaches the other ranks, and what they check of it."""

import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import torch
from places import Place
from states import DATASET, small_state

from elastic_mnist.errors import AlreadyReported, ReportedByRank0, UsageError
from elastic_mnist.ipc import environment
from elastic_mnist.settings import Settings
from elastic_mnist.snapshots.durable import DurableTier
from elastic_mnist.snapshots.resume import Start, check_same_settings
from elastic_mnist.snapshots.run_config import requested
from elastic_mnist.worker.start import agree_on_start

if TYPE_CHECKING:
    from elastic_mnist.worker.context import WorkerContext


def fresh(_place: Place) -> None:
    """Leave nothing to start from."""


def restarted(place: Place) -> None:
    """Have a generation behind, with an unknown number of lost steps."""
    place.decide()


def from_storage(place: Place) -> None:
    """Have a snapshot."""
    place.commit(5)


def finished(place: Place) -> None:
    """Have nothing left to do."""
    place.commit(26, run_id=place.decide().record.run_id)
    place.finish()


class PickledMessages:
    """The world of two ranks that run one after the other: rank 1 gets pickles of what rank 0 broadcast."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 2
        self._messages: list[bytes] = []

    def gather(self, value: object) -> list[object]:
        """Return what rank 0 has; rank 1 is yet to come."""
        return [value, None] if self.rank == 0 else []

    def broadcast(self, value: object, *, source: int = 0) -> object:
        """Keep rank 0's message, or return it."""
        assert source == 0
        if self.rank == 0:
            self._messages.append(pickle.dumps(value))
            return value
        return pickle.loads(self._messages.pop(0))  # noqa: S301 - pickled above

    broadcast_bytes = broadcast


def agreed(place: Place, *settings: Settings, devices: tuple[str, str] = ("cpu", "cpu")) -> list[Start]:
    """Return what rank 0 and rank 1, each with settings and a kind of device of its own, know before their start."""
    world, starts = PickledMessages(), []
    for rank in (0, 1):
        world.rank = rank
        context = SimpleNamespace(
            settings=settings[rank],
            dataset_facts=DATASET,
            device=torch.device(devices[rank]),
            world=world,
            env=environment.WorkerEnvironment(rank=rank, local_rank=rank, world_size=2, local_world_size=2),
            storage=place.storage,
            tier=DurableTier(place.storage),
            progress_path=place.progress_path,
        )
        try:
            starts.append(agree_on_start(cast("WorkerContext", context)))
        except AlreadyReported:
            assert rank == 0
    return starts


@pytest.mark.parametrize("prepare", [fresh, restarted, from_storage, finished])
def test_a_decision_arrives_as_it_was_made(prepare: Callable[[Place], None], tmp_path: Path) -> None:
    """Every field of every kind of start, the state's bytes too, is the same at rank 1; the lease is rank 0's alone."""
    place, settings = Place(tmp_path), Settings(batch_size=8, epochs=2)
    prepare(place)
    first, second = agreed(place, settings, settings)
    assert first == second
    assert (first.finished is not None) == (prepare is finished)
    assert (first.lease is None, second.lease) == (prepare is finished, None)


def test_a_state_arrives_whole(tmp_path: Path) -> None:
    """Rank 1 unpacks the state that rank 0 has read, of a snapshot at another place too."""
    place, other = Place(tmp_path), Place(tmp_path / "other")
    other.commit(5)
    settings = Settings(batch_size=8, resume_from=str(other.directory))
    state = agreed(place, settings, settings)[1].state()
    assert state is not None
    assert state["model"]["weight"].equal(small_state(5)["model"]["weight"])


def test_an_error_of_rank_0_is_raised_at_every_rank(tmp_path: Path) -> None:
    """Where rank 0 cannot decide, rank 1 raises a UsageError with the same text."""
    place, settings = Place(tmp_path), Settings(batch_size=8, resume_from=str(tmp_path / "nothing"))
    with pytest.raises(UsageError) as here:
        place.decide(resume_from=settings.resume_from)
    with pytest.raises(ReportedByRank0) as there:
        agreed(place, settings, settings)
    assert str(there.value) == str(here.value)


def test_the_same_settings_are_agreed_on(tmp_path: Path) -> None:
    """A rank started with rank 0's options goes on, also where options that change no result differ."""
    others = Settings(batch_size=8, threads=3, save_every=7, keep_last=9, log_format="json", hang_timeout=5.0)
    first, second = agreed(Place(tmp_path), Settings(batch_size=8), others)
    assert first == second


@pytest.mark.parametrize(
    ("field", "settings", "dataset"),
    [
        ("seed", Settings(batch_size=8, seed=1), DATASET),
        ("batch_size", Settings(batch_size=9), DATASET),
        ("global_batch_size", Settings(batch_size=8, global_batch_size=8), DATASET),
        ("lr", Settings(batch_size=8, lr=0.5), DATASET),
        ("precision", Settings(batch_size=8, precision="bf16"), DATASET),
        ("lr_schedule", Settings(batch_size=8, lr_schedule="cosine"), DATASET),
        ("data_sha256", Settings(batch_size=8), {**DATASET, "sha256": "ab" * 32}),
    ],
)
def test_other_settings_than_rank_0s_are_refused_by_name(
    field: str, settings: Settings, dataset: dict[str, object], tmp_path: Path
) -> None:
    """The error is one line that names the field and says what to do."""
    start = Place(tmp_path).decide()
    with pytest.raises(UsageError, match=f"[:;] {field} is .*; start all nodes with the same options$") as caught:
        check_same_settings(start, requested(settings, dataset))
    assert "\n" not in str(caught.value)


def test_the_smaller_side_of_a_difference_is_checked_too(tmp_path: Path) -> None:
    """Where rank 0 has a cosine and this rank has none, the schedule is named."""
    start = Place(tmp_path).decide(lr_schedule="cosine")
    with pytest.raises(UsageError, match="lr_schedule is constant here and cosine at rank 0"):
        check_same_settings(start, requested(Settings(batch_size=8), DATASET))


@pytest.mark.parametrize(
    ("field", "here"), [("epochs", Settings(batch_size=8, epochs=9)), ("test_samples", Settings(test_samples=9))]
)
def test_what_decides_on_the_collectives_must_be_the_same(field: str, here: Settings, tmp_path: Path) -> None:
    """Part of no contract, another number of epochs or test samples at one node is refused by name all the same."""
    wanted = getattr(Settings(batch_size=8), field)
    with pytest.raises(UsageError, match=f"[:;] {field} is 9 here and {wanted} at rank 0; start all nodes with the"):
        agreed(Place(tmp_path), Settings(batch_size=8), here)


def test_another_kind_of_device_is_refused_by_name(tmp_path: Path) -> None:
    """A node with CUDA and one without cannot meet in one all-reduce."""
    both = Settings(batch_size=8)
    with pytest.raises(UsageError, match="device is cuda here and cpu at rank 0"):
        agreed(Place(tmp_path), both, both, devices=("cpu", "cuda"))

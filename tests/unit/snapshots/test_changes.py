"""A job goes on under other settings only where they do not change its result, or where it is told to."""

import re
from pathlib import Path
from typing import Any

import pytest
from places import Place
from states import DATASET
from structlog.testing import capture_logs

from elastic_mnist.errors import UsageError
from elastic_mnist.settings import Settings

CHANGES: dict[str, dict[str, Any]] = {
    "seed": {"seed": 1},
    "lr": {"lr": 0.01},
    "lr_schedule": {"lr_schedule": "cosine"},
    "batch_size": {"batch_size": 16},
    "global_batch_size": {"global_batch_size": 16},
    "micro_batch_size": {"micro_batch_size": 32},
    "precision": {"precision": "bf16"},
    "gradient_sync": {"gradient_sync": "allreduce"},
    "dataset": {"dataset": {**DATASET, "name": "fashion_mnist"}},
    "train_samples": {"dataset": {**DATASET, "num_samples": 99}},
    "data_sha256": {"dataset": {**DATASET, "sha256": "ab" * 32}},
}

ORDER = ("seed", "dataset", "train_samples", "data_sha256")  # what the order of an epoch's samples hangs on


@pytest.fixture
def at_step_13(tmp_path: Path) -> Place:
    """A place with a run's record and its snapshot of step 13, at the end of epoch 0."""
    return Place.at_step(tmp_path, 13)


def accepted(place: Place, field: str) -> None:
    """Accept a change, and assert that the same run goes on from its snapshot under the new value."""
    run_id = place.record().run_id
    start = place.decide(**CHANGES[field], accept_changes=True)
    assert (start.source, start.record.run_id) == ("storage", run_id)
    new = next(iter(CHANGES[field].values()))
    wanted = {"dataset": "fashion_mnist", "train_samples": 99, "data_sha256": "ab" * 32}.get(field, new)
    assert dict(start.record.contract)[field] == wanted


@pytest.mark.parametrize("field", CHANGES)
def test_a_change_of_the_result_is_refused_by_name(field: str, at_step_5: Place) -> None:
    """The error is one line that names the place, the field and how to accept it."""
    with pytest.raises(UsageError) as caught:
        at_step_5.decide(**CHANGES[field])
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(at_step_5.directory))
    assert re.search(rf"[:;] {field} was \S+ and is now \S+[;,]", message)
    assert "--accept_changes" in message


@pytest.mark.parametrize("field", CHANGES)
def test_a_refused_start_changes_nothing(field: str, at_step_5: Place) -> None:
    """No file of the other job is written."""
    before = at_step_5.files()
    with pytest.raises(UsageError):
        at_step_5.decide(**CHANGES[field])
    assert at_step_5.files() == before


@pytest.mark.parametrize("field", CHANGES)
def test_a_change_that_is_accepted_at_an_epochs_end_becomes_part_of_the_contract(field: str, at_step_13: Place) -> None:
    """With --accept_changes the same run goes on from its snapshot, under the new value, whatever it is."""
    accepted(at_step_13, field)


@pytest.mark.parametrize("field", [field for field in CHANGES if field not in ORDER])
def test_a_change_that_is_accepted_in_mid_epoch_becomes_part_of_the_contract(field: str, at_step_5: Place) -> None:
    """With --accept_changes the same run goes on from its snapshot, under the new value."""
    accepted(at_step_5, field)


@pytest.mark.parametrize("field", ORDER)
def test_another_order_of_samples_is_not_accepted_in_mid_epoch(field: str, at_step_5: Place) -> None:
    """The error is one line that names the snapshot and the field, and no file of the job is written."""
    before = at_step_5.files()
    with pytest.raises(UsageError, match=r"change it at the end of an epoch$") as caught:
        at_step_5.decide(**CHANGES[field], accept_changes=True)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{at_step_5.directory}/step-00000005.pt lies in the middle of an epoch")
    assert f" where {field} cannot change" in message
    assert at_step_5.files() == before


def test_all_that_changes_the_order_of_samples_is_named(at_step_5: Place) -> None:
    """Three fields at once are in one error."""
    with pytest.raises(UsageError, match="where dataset and data_sha256 and seed cannot change"):
        at_step_5.decide(seed=1, dataset={**DATASET, "name": "fashion_mnist", "sha256": "ab" * 32}, accept_changes=True)


def test_an_order_accepted_at_an_epochs_end_does_not_reach_an_older_snapshot_in_mid_epoch(
    at_step_13: Place,
) -> None:
    """Where the epoch's end turns out damaged, the epoch before is not gone on with in another order."""
    at_step_13.commit(5, run_id=at_step_13.record().run_id)
    at_step_13.decide(seed=1, accept_changes=True)
    (at_step_13.directory / "step-00000013.pt").write_bytes(b"damaged")
    with pytest.raises(UsageError, match=r"step-00000005\.pt lies in the middle of an epoch, where seed cannot change"):
        at_step_13.decide(seed=1)


@pytest.mark.parametrize("field", CHANGES)
def test_a_change_that_was_accepted_once_is_not_asked_about_again(field: str, at_step_13: Place) -> None:
    """The next generation goes on under the new value without --accept_changes."""
    accepted = at_step_13.decide(**CHANGES[field], accept_changes=True)
    assert at_step_13.decide(**CHANGES[field]).record.contract == accepted.record.contract


def test_accepted_changes_are_told(at_step_13: Place) -> None:
    """A warning names each."""
    with capture_logs() as events:
        at_step_13.decide(seed=1, lr=0.5, accept_changes=True)
    (event,) = events
    assert (event["event"], event["log_level"]) == ("run.settings_changed", "warning")
    assert event["changed"] == ["lr was 0.001 and is now 0.5", "seed was 0 and is now 1"]


def test_an_accepted_batch_size_counts_for_the_world_of_that_moment(at_step_5: Place) -> None:
    """Samples per process times the world size at which it was accepted, from then on fixed."""
    at_step_5.decide(batch_size=16, world_size=3, accept_changes=True)
    assert at_step_5.decide(batch_size=16, world_size=2).record.contract["global_batch_size"] == 48


def test_the_world_and_what_does_not_change_the_result_may_change(at_step_5: Place) -> None:
    """World size, device, threads, epochs, paths of logs and the rhythm of saving need no flag."""
    start = at_step_5.decide(
        world_size=7,
        device_type="cuda",
        device="cuda",
        threads=3,
        epochs=50,
        save_every=7,
        save_every_steps=3,
        keep_last=9,
        hang_timeout=5.0,
        log_format="json",
        event_log=Path("elsewhere.jsonl"),
        test_samples=10,
    )
    assert start.source == "storage"


def test_with_a_cosine_the_epochs_are_part_of_the_contract(place: Place) -> None:
    """The schedule ends with the job: more epochs change what was done, and are refused by name."""
    place.commit(5, settings=Settings(batch_size=8, lr_schedule="cosine"))
    with pytest.raises(UsageError, match="epochs was 5 and is now 7"):
        place.decide(lr_schedule="cosine", epochs=7)

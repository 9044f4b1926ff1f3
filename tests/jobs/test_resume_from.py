"""A start from a snapshot elsewhere: `--resume_from` names a file, a directory or a URL."""

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SMALL, Job, plain
from places import Place
from states import STEPS_PER_EPOCH, commit, small_state
from structlog.testing import capture_logs

from elastic_mnist.errors import UsageError
from elastic_mnist.snapshots.state import pack
from elastic_mnist.snapshots.storage import LocalStorage, open_storage
from elastic_mnist.training.model import build


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A place where nothing is yet."""
    return Place(tmp_path / "here")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Another run's directory, with its snapshots of steps 5 and 9."""
    storage = LocalStorage(tmp_path / "source")
    storage.create()
    for step in (5, 9):
        commit(storage, step)
    return tmp_path / "source"


def test_a_file_is_gone_on_from(place: Place, source: Path) -> None:
    """The very snapshot that is named, newest or not."""
    start = place.decide(resume_from=f"{source}/step-00000005.pt")
    assert (start.source, start.path, start.data) == ("file", f"{source}/step-00000005.pt", pack(small_state(5)))


def test_the_newest_of_a_directory_is_gone_on_from(place: Place, source: Path) -> None:
    """A directory stands for its newest valid snapshot."""
    start = place.decide(resume_from=str(source))
    assert (start.source, start.path, start.data) == ("file", f"{source}/step-00000009.pt", pack(small_state(9)))


def test_the_newest_of_a_url_is_gone_on_from(place: Place, tmp_path: Path) -> None:
    """An object store's place is read like a directory."""
    url = f"memory://{tmp_path.name}-resume"
    commit(open_storage(url), 5)
    start = place.decide(resume_from=url)
    assert (start.path, start.data) == (f"{url}/step-00000005.pt", pack(small_state(5)))


def test_a_file_in_the_working_directory_is_found(place: Place, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name without a directory is one beside the user."""
    monkeypatch.chdir(source)
    assert place.decide(resume_from="step-00000005.pt").data == pack(small_state(5))


def test_a_file_in_the_root_directory_is_not_looked_for_elsewhere(
    place: Place, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/step-00000005.pt is not the file of that name in the working directory."""
    monkeypatch.chdir(source)
    with pytest.raises(UsageError, match="no such file"):
        place.decide(resume_from="/step-00000005.pt")


def test_a_copy_without_its_manifest_is_gone_on_from(place: Place, source: Path, tmp_path: Path) -> None:
    """A snapshot file alone, under any name, serves."""
    (tmp_path / "best.pt").write_bytes((source / "step-00000005.pt").read_bytes())
    assert place.decide(resume_from=str(tmp_path / "best.pt")).data == pack(small_state(5))


def test_a_start_from_a_file_is_a_run_of_its_own(place: Place, source: Path) -> None:
    """It has a new name and counts its own generations, under the contract of the snapshot."""
    start = place.decide(resume_from=str(source), world_size=3)
    assert start.record.run_id != small_state()["run_id"]
    assert (start.record.generation, start.num_lost_steps) == (0, 0)
    assert start.record.contract == small_state()["contract"]


def test_the_source_is_left_as_it_is(place: Place, source: Path) -> None:
    """No file of the other run changes, not even a damaged one."""
    (source / "step-00000009.pt").write_bytes(b"damaged")
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in source.iterdir()}
    assert place.decide(resume_from=str(source)).data == pack(small_state(5))
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in source.iterdir()} == before


def test_the_jobs_own_snapshots_come_first(place: Place, source: Path) -> None:
    """Restarted with the same command, the job goes on from what it made itself."""
    first = place.decide(resume_from=str(source))
    place.commit(11, run_id=first.record.run_id)
    second = place.decide(resume_from=str(source))
    assert (second.source, second.path) == ("storage", f"{place.directory}/step-00000011.pt")
    assert (second.record.run_id, second.record.generation) == (first.record.run_id, 1)


def test_a_run_killed_before_its_first_own_snapshot_goes_on_as_the_same_run(place: Place, source: Path) -> None:
    """Restarted with the same command, it starts from the file again, with its name and its lost steps."""
    first = place.decide(resume_from=str(source))
    place.progress(first, 12)
    second = place.decide(resume_from=str(source), world_size=2)
    assert (second.source, second.num_lost_steps) == ("file", 3)
    assert (second.record.run_id, second.record.generation) == (first.record.run_id, 1)


def test_a_run_killed_before_its_first_own_snapshot_keeps_an_accepted_batch_size(place: Place, source: Path) -> None:
    """The world at which the batch size was accepted decides, not that of the next generation."""
    options: dict[str, Any] = {"resume_from": str(source), "batch_size": 16, "accept_changes": True}
    first = place.decide(**options, world_size=3)
    assert first.record.contract["global_batch_size"] == 48
    second = place.decide(**options, world_size=2)
    assert (second.record.run_id, second.record.contract) == (first.record.run_id, first.record.contract)


def test_other_settings_are_refused_by_name(place: Place, source: Path) -> None:
    """The error names the file, the field and how to accept it, and claims nothing."""
    path = f"{source}/step-00000005.pt"
    with pytest.raises(UsageError, match=f"^{path} was made under .*: seed was 0 and is now 1; .*--accept_changes$"):
        place.decide(resume_from=path, seed=1)
    assert not place.directory.exists()


def test_other_settings_are_accepted_when_told(place: Place, source: Path) -> None:
    """With --accept_changes it goes on under the new value."""
    start = place.decide(resume_from=str(source), lr=0.5, accept_changes=True)
    assert (start.source, start.record.contract["lr"]) == ("file", 0.5)


def test_another_order_of_samples_is_refused_in_mid_epoch(place: Place, source: Path) -> None:
    """Not even --accept_changes lets a seed change there; the error names file and field, and nothing is claimed."""
    path = f"{source}/step-00000005.pt"
    with pytest.raises(UsageError, match=f"^{path} lies in the middle of an epoch, where seed cannot change"):
        place.decide(resume_from=path, seed=1, accept_changes=True)
    assert not place.directory.exists()


def test_another_order_of_samples_is_accepted_at_an_epochs_end(place: Place, source: Path) -> None:
    """With --accept_changes the next epoch is drawn from the new seed."""
    commit(LocalStorage(source), 13)
    start = place.decide(resume_from=str(source), seed=1, accept_changes=True)
    assert (start.source, start.record.contract["seed"]) == ("file", 1)


def refused(place: Place, location: str) -> str:
    """Return the one line with which a location is refused."""
    with pytest.raises(UsageError, match=f"^--resume_from {location}[:/ ]") as caught:
        place.decide(resume_from=location)
    assert not place.directory.exists()
    message = str(caught.value)
    assert "\n" not in message
    assert "--snapshot_path" not in message
    return message


def test_a_missing_file_is_refused(place: Place, tmp_path: Path) -> None:
    """A typo is never a fresh start."""
    assert "no such file" in refused(place, f"{tmp_path}/typo.pt")


def test_a_missing_directory_is_refused(place: Place, tmp_path: Path) -> None:
    """A typo in a directory's name is never a fresh start."""
    assert "no snapshot there" in refused(place, f"{tmp_path}/typo")


def test_a_file_in_the_way_is_refused(place: Place, tmp_path: Path) -> None:
    """A regular file that is no snapshot's name cannot be listed."""
    (tmp_path / "notes.txt").write_text("x")
    refused(place, f"{tmp_path}/notes.txt")


@pytest.mark.parametrize("damage", [b"", b"half", b"\0" * 3000])
def test_a_damaged_file_with_its_manifest_is_refused(damage: bytes, place: Place, source: Path) -> None:
    """No other snapshot is taken in the place of the one that was named."""
    (source / "step-00000009.pt").write_bytes(damage)
    assert "name another snapshot" in refused(place, f"{source}/step-00000009.pt")


@pytest.mark.parametrize("damage", [b"", b"half", b"\0" * 3000])
def test_a_damaged_copy_is_refused(damage: bytes, place: Place, tmp_path: Path) -> None:
    """A file that is no snapshot is one line."""
    (tmp_path / "best.pt").write_bytes(damage)
    assert "name another snapshot" in refused(place, f"{tmp_path}/best.pt")


def test_a_directory_of_damaged_snapshots_is_refused(place: Place, source: Path) -> None:
    """With nothing whole there, nothing is taken, and the damage is told as such."""
    for path in source.glob("*.pt"):
        path.write_bytes(b"damaged")
    assert "all of the 2 snapshots there are damaged; name another snapshot" in refused(place, str(source))


def test_an_unknown_kind_of_url_is_refused(place: Place) -> None:
    """The error is about --resume_from, not about --snapshot_path."""
    refused(place, "nowhere://bucket/run")


@pytest.mark.parametrize(("kind", "num_epochs"), [("tutorial", 3), ("plain", 0)])
def test_another_programs_file_begins_a_run(kind: str, num_epochs: int, tmp_path: Path) -> None:
    """Its weights, and what it says is finished, are the run's beginning; what it lacks is told."""
    weights = {key: value.clone() for key, value in build(3).state_dict().items()}
    content = {"MODEL_STATE": weights, "EPOCHS_RUN": num_epochs - 1} if kind == "tutorial" else weights
    torch.save(content, tmp_path / "foreign.pt")
    place = Place(tmp_path)
    with capture_logs() as events:
        start = place.decide(resume_from=str(tmp_path / "foreign.pt"))
    assert start.source == "file"
    (told,) = [event for event in events if event["event"] == "snapshot.incomplete"]
    assert any("moments" in text for text in told["lacking"])
    state = start.state()
    assert state is not None
    assert (state["epoch"], state["step"], state["samples_in_epoch"]) == (num_epochs, num_epochs * STEPS_PER_EPOCH, 0)
    assert all(state["model"][key].equal(weights[key]) for key in weights)
    place.progress(start, num_epochs * STEPS_PER_EPOCH + 4)
    again = place.decide(resume_from=str(tmp_path / "foreign.pt"))
    assert (again.record.generation, again.num_lost_steps) == (1, 4)


@pytest.mark.parametrize("num_epochs", [3, 7])
def test_another_programs_file_that_has_finished_all_epochs_is_refused(num_epochs: int, tmp_path: Path) -> None:
    """With as many epochs behind it as --epochs or more, one line names both numbers; nothing is claimed."""
    content = {"MODEL_STATE": build(3).state_dict(), "EPOCHS_RUN": num_epochs - 1}
    torch.save(content, tmp_path / "foreign.pt")
    place = Place(tmp_path)
    with pytest.raises(UsageError) as caught:
        place.decide(resume_from=str(tmp_path / "foreign.pt"), epochs=3)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/foreign.pt: {num_epochs} epochs are finished there, and --epochs is 3; ")
    assert "\n" not in message
    assert not place.directory.exists()
    place = Place(tmp_path / "more")
    assert place.decide(resume_from=str(tmp_path / "foreign.pt"), epochs=num_epochs + 1).source == "file"


def test_a_job_goes_on_from_a_bare_state_dict(tmp_path: Path) -> None:
    """A real job takes another script's weights as they are: its first epoch is better than any before."""
    options = (*SMALL, "--dataset=synthetic", "--train_samples=600", "--test_samples=60")
    with Job(tmp_path / "first", tmp_path, plain(), options) as job:
        trained = job.finish()
        losses = [event["train_loss"] for event in job.events("epoch.finished")]
    state = torch.load(tmp_path / "first" / "snapshots" / f"step-{trained['step']:08d}.pt", weights_only=True)
    torch.save({f"module.{key}": value for key, value in state["model"].items()}, tmp_path / "bare.pth")
    resumed = (*options, "--epochs=1", f"--resume_from={tmp_path}/bare.pth")
    with Job(tmp_path / "second", tmp_path, plain(), resumed) as job:
        job.finish()
        (epoch,) = job.events("epoch.finished")
        assert epoch["train_loss"] < losses[-1] < losses[0]
        assert [event["source"] for event in job.events("run.resumed")] == ["file"]

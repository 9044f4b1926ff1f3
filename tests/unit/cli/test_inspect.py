"""`elastic-mnist inspect`: what lies at a place, and whether it is whole."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from networks import bare, saved
from states import RUN_ID, Fault, FaultyStorage, commit, manifest_of, small_state
from structlog.testing import capture_logs

from elastic_mnist.cli.main import main
from elastic_mnist.errors import StoreError
from elastic_mnist.snapshots import listing
from elastic_mnist.snapshots.record import RunRecord
from elastic_mnist.snapshots.state import pack
from elastic_mnist.snapshots.storage import LocalStorage, open_storage
from elastic_mnist.training.model import weights_sha256


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with whole snapshots of steps 5, 13 and 30."""
    storage = LocalStorage(tmp_path / "place")
    storage.create()
    with capture_logs():
        for step in (5, 13, 30):
            commit(storage, step)
    return tmp_path / "place"


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def seen(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Return status and object of `inspect --json`; nothing else is on either stream."""
    status = main(["inspect", "--json", *arguments])
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    assert err == ""
    content: dict[str, Any] = json.loads(line)
    return status, content


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    """Return status and lines for people."""
    status = main(["inspect", *arguments])
    out, err = capsys.readouterr()
    assert err == ""
    return status, out.splitlines()


def verdicts(content: dict[str, Any]) -> dict[int, str]:
    """Return the verdict on each step."""
    return {entry["step"]: entry["verdict"] for entry in content["snapshots"]}


def test_whole_snapshots_are_listed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All that the manifests say of them stands there, the newest first, by number; status 0."""
    status, content = seen(capsys, str(place))
    assert (status, content["verdict"], content["num_whole"], content["num_damaged"]) == (0, "whole", 3, 0)
    assert [entry["step"] for entry in content["snapshots"]] == [30, 13, 5]
    newest = content["snapshots"][0]
    age = newest.pop("age_seconds")
    assert abs(newest["created_at"] + age - time.time()) < 60
    manifest = manifest_of(small_state(30), pack(small_state(30)))
    assert newest == {
        "path": f"{place}/step-00000030.pt",
        "verdict": "whole",
        "reason": None,
        "kind": None,
        "step": 30,
        "epoch": 2,
        "samples_in_epoch": 32,
        "size_bytes": (place / "step-00000030.pt").stat().st_size,
        "created_at": manifest.created_at,
        "test_accuracy": 0.5,
        "run_id": RUN_ID,
        "generation": 0,
        "weights_sha256": weights_sha256(small_state(30)["model"]),
        "lacking": [],
    }


def test_people_get_a_table(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A heading, a row a snapshot with the same facts, and the sum."""
    status, lines = shown(capsys, str(place))
    assert status == 0
    assert lines[0] == str(place)
    assert lines[1].split() == ["verdict", "step", "epoch", "samples", "accuracy", "size", "age", "run", "generation"]
    row = lines[2].split()
    assert row[:5] == ["whole", "30", "2", "32", "0.5000"]
    assert row[-2:] == [RUN_ID, "0"]
    assert lines[-1] == "3 whole"
    assert len(lines) == 6


@pytest.mark.parametrize("name", ["step-00000013.pt", "step-00000013.json"])
def test_a_flipped_bit_is_found(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bytes are really read: the snapshot is damaged and says why, the others are whole; status 1."""
    flip(place / name)
    status, content = seen(capsys, str(place))
    assert status == 1
    assert verdicts(content) == {30: "whole", 13: "damaged", 5: "whole"}
    assert content["snapshots"][1]["reason"]
    assert shown(capsys, str(place))[1][-1] == "1 damaged, 2 whole"


def test_missing_data_is_found(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A manifest without its data is damage."""
    (place / "step-00000013.pt").unlink()
    status, content = seen(capsys, str(place))
    assert (status, verdicts(content)[13]) == (1, "damaged")
    assert "step-00000013.pt is missing" in content["snapshots"][1]["reason"]


@pytest.mark.parametrize("option", ["--no_verify", "--no-verify"])
def test_without_verifying_only_manifests_are_read(
    option: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Damage in the data is not seen, and nothing is called whole; damage in a manifest is."""
    flip(place / "step-00000013.pt")
    status, content = seen(capsys, str(place), option)
    assert (status, set(verdicts(content).values())) == (0, {"not read"})
    assert (content["snapshots"][1]["epoch"], content["num_whole"]) == (1, 0)
    flip(place / "step-00000013.json")
    status, content = seen(capsys, str(place), option)
    assert (status, verdicts(content)) == (1, {30: "not read", 13: "damaged", 5: "not read"})


def test_what_does_not_count_is_marked(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Data without a manifest is uncommitted, what was set aside says so; neither is damage, and the rest is whole."""
    (place / "step-00000040.pt").write_bytes(b"half")
    for suffix in (".json", ".pt"):
        (place / f"step-00000013{suffix}").rename(place / f"step-00000013{suffix}.rejected")
    for name in ("events.jsonl", "notes.txt", "step-7.pt", ".step-00000050.pt.0123.tmp"):
        (place / name).write_text("x")
    status, content = seen(capsys, str(place))
    assert status == 0
    assert verdicts(content) == {40: "uncommitted", 30: "whole", 13: "set aside", 5: "whole"}
    assert (content["num_uncommitted"], content["num_set_aside"]) == (1, 1)


def test_a_step_made_again_stands_beside_what_was_set_aside(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both are listed under the same step."""
    for suffix in (".json", ".pt"):
        shutil.copy(place / f"step-00000013{suffix}", place / f"step-00000013{suffix}.rejected")
    content = seen(capsys, str(place))[1]
    assert [(entry["step"], entry["verdict"]) for entry in content["snapshots"]] == [
        (30, "whole"),
        (13, "whole"),
        (13, "set aside"),
        (5, "whole"),
    ]


def test_nothing_is_changed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not even what is damaged is set aside: a job alone does that."""
    flip(place / "step-00000013.pt")
    flip(place / "step-00000005.json")

    def files() -> dict[str, tuple[int, bytes]]:
        return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in place.iterdir()}

    before = files()
    assert seen(capsys, str(place))[0] == 1
    assert files() == before


def test_the_runs_record_is_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run, generation, whether it is finished, and its contract, in flat keys."""
    record = RunRecord.new(small_state()["contract"], started_at=12.5, resumed_from="/elsewhere/step-00000005.pt")
    LocalStorage(place).put("run.json", record.to_json())
    content = seen(capsys, str(place))[1]
    plain = record.to_plain()
    for key in ("run_id", "generation", "started_at", "is_finished", "num_lost_steps", "resumed_from"):
        assert content[key] == plain[key]
    assert {key: content[f"contract_{key}"] for key in record.contract} == record.contract
    assert all(not isinstance(value, dict) for value in content.values())
    lines = shown(capsys, str(place))[1]
    assert lines[1].startswith(f"run {record.run_id}: not finished, generation 0")
    assert any("/elsewhere/step-00000005.pt" in line for line in lines)
    assert any("lr_schedule constant" in line for line in lines)


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"run_id": 1}', "[" * 100_000])
def test_a_damaged_record_is_damage(damage: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is told, with the snapshots; status 1."""
    (place / "run.json").write_text(damage)
    status, content = seen(capsys, str(place))
    assert (status, content["num_whole"]) == (1, 3)
    assert content["record_damage"].startswith("run.json is not readable")
    assert any("run.json is not readable" in line for line in shown(capsys, str(place))[1])


def test_an_empty_place_is_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing there, or nothing that counts: status 3, and it says so."""
    assert shown(capsys, str(tmp_path)) == (3, [str(tmp_path), "no snapshots"])
    (tmp_path / "step-00000005.pt").write_bytes(b"half")
    status, content = seen(capsys, str(tmp_path))
    assert (status, content["verdict"], verdicts(content)) == (3, "empty", {5: "uncommitted"})


@pytest.mark.parametrize("name", ["typo", "typo.pt", "pipe.pt", "notes.txt/", "nowhere://bucket/run"])
def test_what_cannot_be_accessed_is_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A typo, a pipe, an unknown kind of store: status 2."""
    os.mkfifo(tmp_path / "pipe.pt")
    location = name if "://" in name else f"{tmp_path}/{name}"
    assert main(["inspect", location]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith(f"elastic-mnist: error: PATH_OR_URL {location.rpartition('/')[0]}")


def test_a_url_is_looked_at_like_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An object store's snapshots are read and judged; a single one of them, too."""
    url = f"memory://{tmp_path.name}-inspect"
    storage = open_storage(url)
    with capture_logs():
        commit(storage, 5)
        commit(storage, 9)
    storage.put("step-00000009.pt", b"damaged")
    status, content = seen(capsys, url)
    assert (status, content["location"], verdicts(content)) == (1, url, {9: "damaged", 5: "whole"})
    assert seen(capsys, f"{url}/step-00000005.pt")[0] == 0
    assert seen(capsys, f"{url}/step-00000009.pt")[0] == 1


def test_one_file_with_its_manifest(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is held against its checksum, and the others are not asked."""
    flip(place / "step-00000030.pt")
    status, content = seen(capsys, f"{place}/step-00000013.pt")
    assert (status, verdicts(content)) == (0, {13: "whole"})
    status, content = seen(capsys, f"{place}/step-00000030.pt")
    assert (status, verdicts(content)) == (1, {30: "damaged"})


def test_a_copy_without_a_manifest(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it says of itself is told; it reads, and is not called whole."""
    shutil.copy(place / "step-00000030.pt", tmp_path / "best.pt")
    status, content = seen(capsys, f"{tmp_path}/best.pt")
    (entry,) = content["snapshots"]
    assert (status, entry["verdict"], entry["reason"]) == (0, "readable", "no manifest beside it")
    assert (entry["step"], entry["epoch"], entry["samples_in_epoch"], entry["run_id"]) == (30, 2, 32, RUN_ID)
    assert entry["weights_sha256"] == weights_sha256(small_state(30)["model"])


def test_another_programs_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its kind, its epochs, the digest of its weights and all that it lacks."""
    (tmp_path / "snapshot.pth").write_bytes(saved({"MODEL_STATE": bare().state_dict(), "EPOCHS_RUN": 2}))
    status, content = seen(capsys, f"{tmp_path}/snapshot.pth")
    (entry,) = content["snapshots"]
    assert (status, entry["verdict"], entry["epoch"], entry["step"]) == (0, "readable", 3, None)
    assert "DDP tutorial" in entry["kind"]
    assert entry["weights_sha256"] == weights_sha256(bare().state_dict())
    assert "the optimizer's moments: they begin at zero" in entry["lacking"]
    lines = shown(capsys, f"{tmp_path}/snapshot.pth")[1]
    assert "    lacks the optimizer's moments: they begin at zero" in lines


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"hello, world", "not readable as plain data: it is no file of torch.save, or only a part of one"),
        (b"", "it has 0 bytes"),
        (saved(bare(width=64).state_dict()), "weight classifier.0.weight has the shape (64, 9216)"),
        (pack(small_state(step=3))[:-100], "not readable as plain data"),
        (saved({"format": "elastic_mnist.snapshot", "version": 1}), "its field model is missing"),
    ],
    ids=["text", "empty", "narrow", "cut", "incomplete"],
)
def test_a_file_that_will_not_do(
    content: bytes, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 1, and the reason."""
    (tmp_path / "best.pt").write_bytes(content)
    status, seen_content = seen(capsys, f"{tmp_path}/best.pt")
    (entry,) = seen_content["snapshots"]
    assert (status, entry["verdict"]) == (1, "unfit")
    assert reason in entry["reason"]


def test_a_later_programs_snapshot_is_not_called_damaged(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is whole, only not for this program."""
    state = small_state(30)
    buffer = saved({"format": "elastic_mnist.snapshot", **state, "version": 2})
    manifest = manifest_of(state, buffer)
    (place / manifest.data_name).write_bytes(buffer)
    (place / manifest.name).write_bytes(manifest.to_json())
    status, content = seen(capsys, str(place))
    assert (status, verdicts(content)[30]) == (2, "unreadable")
    assert "install a later one" in content["snapshots"][0]["reason"]


def test_a_place_that_cannot_be_listed_is_one_line(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Denied access is never "nothing there": status 2, and nothing on standard output."""
    fault = Fault(at=0, of=("names",), raises=StoreError("403 Forbidden"))
    storage = FaultyStorage(LocalStorage(place), fault)
    monkeypatch.setattr(listing, "locate", lambda *_, **__: (storage, None))
    assert main(["inspect", str(place)]) == 2
    assert fault.num_fired == 1
    assert capsys.readouterr() == ("", "elastic-mnist: error: 403 Forbidden\n")

"""`elastic-mnist export`: the weights alone, whole or not at all, for a script that knows nothing of this package."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from networks import Bare, bare, saved
from states import commit, small_state
from structlog.testing import capture_logs

from elastic_mnist.cli.main import main
from elastic_mnist.errors import StoreConflict
from elastic_mnist.snapshots.state import State
from elastic_mnist.snapshots.storage import LocalStorage, open_storage
from elastic_mnist.training.model import build, weights_sha256

IMAGES = torch.randn(5, 1, 28, 28, generator=torch.Generator().manual_seed(0))


def state_of(step: int = 5, *, seed: int = 3, **changes: Any) -> State:  # noqa: ANN401 - a state's fields
    """Return a small state with the whole network's weights."""
    return small_state(step, model=build(seed).state_dict(), **changes)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with snapshots of steps 5 and 9."""
    storage = LocalStorage(tmp_path / "place")
    storage.create()
    with capture_logs():
        for step in (5, 9):
            commit(storage, step, state=state_of(step, seed=step))
    return tmp_path / "place"


def exported(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """Export, and return what was said."""
    assert main(["export", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line with which an export is refused; status 2."""
    assert main(["export", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    return line.removeprefix("elastic-mnist: error: ")


def computes_like(file: Path, seed: int) -> bool:
    """Whether a bare network with the file's weights computes what this package's of a seed does, to the bit."""
    network = Bare().eval()
    network.load_state_dict(torch.load(file, weights_only=True))
    with torch.no_grad():
        return torch.equal(network(IMAGES), build(seed)(IMAGES))


def test_a_bare_network_loads_it(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script's own network takes the file by `load_state_dict`, and computes the same, bit for bit."""
    exported(capsys, f"{place}/step-00000005.pt", f"{tmp_path}/weights.pt")
    assert computes_like(tmp_path / "weights.pt", seed=5)
    assert not computes_like(tmp_path / "weights.pt", seed=9)


def test_a_program_without_this_package_loads_it(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Torch alone reads plain fp32 tensors on the CPU under the model's keys."""
    exported(capsys, str(place), f"{tmp_path}/weights.pt")
    program = (
        "import sys, torch\n"
        "for key, value in torch.load('weights.pt', weights_only=True).items():\n"
        "    print(key, value.dtype, value.device, value.requires_grad, value.is_contiguous())\n"
        "assert not any(name.startswith('elastic') for name in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{key} torch.float32 cpu False True" for key in bare().state_dict()]


def test_what_is_told(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where to, where from, and the digest of the weights as `run.finished` gives it."""
    lines = exported(capsys, f"{place}/step-00000005.pt", f"{tmp_path}/weights.pt")
    assert [line.split() for line in lines] == [
        ["exported", f"{tmp_path}/weights.pt"],
        ["from", f"{place}/step-00000005.pt"],
        ["step", "5,", "epoch", "0,", "run", small_state()["run_id"]],
        ["weights_sha256", weights_sha256(build(5).state_dict())],
    ]
    assert weights_sha256(torch.load(tmp_path / "weights.pt", weights_only=True)) == lines[-1].split()[1]


def test_the_newest_valid_of_a_place(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory stands for its newest snapshot; a damaged one is passed over, told, and left as it is."""
    exported(capsys, str(place), f"{tmp_path}/weights.pt")
    assert computes_like(tmp_path / "weights.pt", seed=9)
    os.truncate(place / "step-00000009.pt", 1000)
    before = sorted(path.name for path in place.iterdir())
    with capture_logs():
        lines = exported(capsys, str(place), f"{tmp_path}/older.pt")
    assert computes_like(tmp_path / "older.pt", seed=5)
    assert any("newer ones there that are damaged: 1" in line for line in lines)
    assert sorted(path.name for path in place.iterdir()) == before


def test_equal_snapshots_give_equal_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `verify` calls equal is exported to the same file, whoever made it; another seed's is not."""
    states = {
        "one": state_of(5),
        "two": state_of(5, run_id="ba9876543210", world_size=3),
        "other": state_of(5, seed=4),
    }
    for name, state in states.items():
        storage = LocalStorage(tmp_path / name)
        storage.create()
        with capture_logs():
            commit(storage, 5, state=state)
        exported(capsys, str(tmp_path / name), f"{tmp_path}/{name}.pt")
    assert main(["verify", str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    files = [(tmp_path / f"{name}.pt").read_bytes() for name in states]
    assert files[0] == files[1] != files[2]


def test_of_a_url_to_a_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both may be in an object store."""
    url = f"memory://{tmp_path.name}-export"
    with capture_logs():
        commit(open_storage(url), 5, state=state_of(5))
    exported(capsys, url, f"{url}/weights.pt")
    (tmp_path / "weights.pt").write_bytes(open_storage(url).get("weights.pt"))
    assert computes_like(tmp_path / "weights.pt", seed=3)
    assert "is there already" in refused(capsys, url, f"{url}/weights.pt")


@pytest.mark.parametrize("key", ["MODEL_STATE", "model"])
def test_another_programs_file_is_made_plain(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DDP's prefix and all but the weights are gone, and it says what the file was."""
    wrapped = {f"module.{name}": value for name, value in bare().state_dict().items()}
    (tmp_path / "snapshot.pth").write_bytes(saved({key: wrapped}))
    lines = exported(capsys, f"{tmp_path}/snapshot.pth", f"{tmp_path}/weights.pt")
    assert computes_like(tmp_path / "weights.pt", seed=3)
    assert lines[1].strip().startswith(f"from {tmp_path}/snapshot.pth, a ")


def test_an_export_is_exported_to_itself(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was exported is a file that may be exported, to the same bytes."""
    exported(capsys, str(place), f"{tmp_path}/one.pt")
    exported(capsys, f"{tmp_path}/one.pt", f"{tmp_path}/two.pt")
    assert (tmp_path / "one.pt").read_bytes() == (tmp_path / "two.pt").read_bytes()


def test_a_file_that_is_there_is_kept(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --force it is refused before anything is read; with it, it is replaced."""
    (tmp_path / "weights.pt").write_text("mine")
    line = refused(capsys, str(place / "nowhere.pt"), f"{tmp_path}/weights.pt")
    assert line == f"FILE {tmp_path}/weights.pt: is there already; name another, or replace it with --force"
    assert (tmp_path / "weights.pt").read_text() == "mine"
    exported(capsys, str(place), f"{tmp_path}/weights.pt", "--force")
    assert computes_like(tmp_path / "weights.pt", seed=9)


def test_a_file_that_comes_meanwhile_is_kept(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program that writes FILE while the snapshot is read keeps what it wrote."""
    fired: list[str] = []

    def written_first(self: LocalStorage, name: str, data: bytes, etag: str | None) -> NoReturn:
        (tmp_path / name).write_text("mine")
        with pytest.raises(StoreConflict) as caught:
            put_if_match(self, name, data, etag)
        fired.append(name)
        raise caught.value

    put_if_match = LocalStorage.put_if_match
    monkeypatch.setattr(LocalStorage, "put_if_match", written_first)
    assert "is there already" in refused(capsys, str(place), f"{tmp_path}/weights.pt")
    assert fired == ["weights.pt"]
    assert (tmp_path / "weights.pt").read_text() == "mine"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_umask_is_kept(
    umask: int, mode: int, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file has the mode that the user's umask says."""
    before = os.umask(umask)
    try:
        exported(capsys, str(place), f"{tmp_path}/weights.pt")
    finally:
        os.umask(before)
    assert (tmp_path / "weights.pt").stat().st_mode & 0o777 == mode


def test_a_file_in_the_working_directory(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name without a directory is one beside the user."""
    monkeypatch.chdir(place.parent)
    exported(capsys, place.name, "weights.pt")
    assert computes_like(place.parent / "weights.pt", seed=9)


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("nowhere/weights.pt", "nowhere is no directory; make it first, or name another"),
        ("notes.txt/weights.pt", "notes.txt is no directory"),
        ("place", "is a directory; name a file in it"),
        ("pipe", "is a device or a pipe, not a file"),
        ("weights/", "names no file"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_target_that_cannot_be_is_one_line(
    file: str, reason: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the target and the way out, also with --force, and leaves everything as it was."""
    (tmp_path / "notes.txt").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    for more in ([], ["--force"]):
        line = refused(capsys, str(place), f"{tmp_path}/{file}", *more)
        assert line.startswith("FILE /")
        assert reason in line
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_a_device_is_not_replaced(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """/dev/null stays what it is, also for root with --force."""
    assert "not a file" in refused(capsys, str(place), "/dev/null", "--force")
    assert not Path("/dev/null").is_file()


def test_a_directory_that_takes_no_files(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where nothing can be written, the line says so."""
    assert "cannot write weights.pt" in refused(capsys, str(place), "/proc/self/weights.pt")


@pytest.mark.parametrize("force", [False, True])
def test_a_full_disk(force: bool, place: Path, tmp_path: Path) -> None:
    """A write that stops half way is one line, the file that was there is whole, and no temporary file is left."""
    (tmp_path / "there.pt").write_text("mine")
    before = sorted(path.name for path in tmp_path.iterdir())
    target = "there.pt --force" if force else "weights.pt"
    limited = f"ulimit -f 1000; exec {sys.executable} -m elastic_mnist.cli.main export {place} {tmp_path}/{target}"
    done = subprocess.run(["bash", "-c", limited], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    name = target.split(maxsplit=1)[0]
    assert f"cannot write {name}: File too large" in line  # a limit stands in for the disk's end, 1 MB of 4.8
    assert (tmp_path / "there.pt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (saved(bare(width=64).state_dict()), "weight classifier.0.weight has the shape (64, 9216)"),
        (b"half", "not readable as plain data"),
        (b"", "0 bytes"),
    ],
    ids=["narrow", "half", "empty"],
)
def test_a_snapshot_that_will_not_do_is_not_exported(
    content: bytes, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 1 with the reason, and no file."""
    (tmp_path / "bad.pt").write_bytes(content)
    assert main(["export", f"{tmp_path}/bad.pt", f"{tmp_path}/weights.pt"]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"damaged   snapshot {tmp_path}/bad.pt: ")
    assert reason in out
    assert not (tmp_path / "weights.pt").exists()


def test_our_own_snapshot_of_another_network_is_not_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is whole and not this network's is told by its keys."""
    storage = LocalStorage(tmp_path)
    with capture_logs():
        commit(storage, 5)
    assert main(["export", f"{tmp_path}/step-00000005.pt", f"{tmp_path}/weights.pt"]) == 1
    assert "lacks features.0.weight and 7 more and has weight" in capsys.readouterr().out


def test_a_snapshot_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A typo is one line that names it; status 2."""
    line = refused(capsys, f"{tmp_path}/typo.pt", f"{tmp_path}/weights.pt")
    assert line == f"snapshot {tmp_path}/typo.pt: no such file; name another"
    assert not (tmp_path / "weights.pt").exists()

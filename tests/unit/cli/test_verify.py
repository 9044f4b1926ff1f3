"""`elastic-mnist verify`: what it prints of whole, damaged, equal and different snapshots, and its exit status."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from states import commit, small_state
from structlog.testing import capture_logs

from elastic_mnist.cli.main import main
from elastic_mnist.snapshots.state import State
from elastic_mnist.snapshots.storage import LocalStorage
from elastic_mnist.training.model import weights_sha256

VALUES = (1.0, -2.5, 0.25, 3.0, 0.0, 7.5)


def state_with(*values: float, **changes: Any) -> State:  # noqa: ANN401 - what `small_state` takes
    """Return a small state whose weight, of shape (2, 3), has these values."""
    return small_state(5, model={"weight": torch.tensor(values or VALUES).reshape(2, 3)}, **changes)


def save(directory: Path, state: State) -> str:
    """Commit a snapshot in a directory, as the durable tier does, and return its path."""
    storage = LocalStorage(directory)
    storage.create()
    with capture_logs():
        return str(directory / commit(storage, state["step"], state=state).data_name)


def tool(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the console command."""
    command = [sys.executable, "-m", "elastic_mnist.cli.main", "verify", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_whole(tmp_path: Path) -> None:
    """The command says of a whole snapshot where it is, its step, epoch and run, and the digest of its weights."""
    state = state_with()
    path = save(tmp_path, state)
    done = tool(path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["whole", path],
        ["step", "5,", "epoch", "0,", "run", state["run_id"]],
        ["weights_sha256", weights_sha256(state["model"])],
    ]


@pytest.mark.parametrize("where", ["data", "manifest"])
def test_a_flipped_byte_is_damage(where: str, tmp_path: Path) -> None:
    """One flipped bit, in the snapshot or in its manifest: status 1, said with the path, and nothing is changed."""
    path = Path(save(tmp_path, state_with()))
    damaged = path if where == "data" else path.with_suffix(".json")
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    done = tool(str(path))
    assert done.returncode == 1
    assert done.stdout.startswith("damaged ")
    assert str(path) in done.stdout
    assert "SHA-256" in done.stdout or "manifest" in done.stdout
    assert "whole" not in done.stdout
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_any_flipped_byte_is_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever in the file the flipped bit lies, the snapshot is damaged."""
    path = Path(save(tmp_path, state_with()))
    data = path.read_bytes()
    for index in range(0, len(data), 97):
        path.write_bytes(data[:index] + bytes([data[index] ^ 0x10]) + data[index + 1 :])
        assert main(["verify", str(path)]) == 1
        assert capsys.readouterr().out.startswith("damaged ")
    path.write_bytes(data)
    assert main(["verify", str(path)]) == 0


def test_the_other_one_may_be_the_damaged_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two snapshots the second is checked like the first, before anything is compared."""
    first, second = (Path(save(tmp_path / name, state_with())) for name in ("first", "second"))
    second.write_bytes(second.read_bytes()[:-1])
    assert main(["verify", str(first), str(second)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["whole", str(first)]
    assert lines[-1].startswith("damaged ")
    assert str(second) in lines[-1]


def test_equal(tmp_path: Path) -> None:
    """Two snapshots with the same bits are equal, whoever wrote them, when, and in which world."""
    first = save(tmp_path / "first", state_with())
    others = {"run_id": "ba9876543210", "generation": 7, "world_size": 3, "versions": {"torch": "another"}}
    second = save(tmp_path / "second", state_with(**others))
    assert Path(first).read_bytes() != Path(second).read_bytes()
    done = tool(first, second)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "equal     weights, optimizer and position, bit for bit"


def test_different(tmp_path: Path) -> None:
    """The command names the first key, the index in it, both values and the largest difference; status 1."""
    first = save(tmp_path / "first", state_with())
    second = save(tmp_path / "second", state_with(1.0, -2.5, 0.25, 3.0, 0.5, 9.5))
    done = tool(first, second)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-2:] == [
        "different 1 keys; first model/weight[1, 1]: 0.0 and 0.5",
        "          largest difference 2",
    ]


def test_what_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is missing, an empty directory: status 2 and one line that names it, whichever of two it is."""
    assert tool(str(tmp_path / "nowhere.pt")).returncode == 2
    whole = save(tmp_path / "whole", state_with())
    (tmp_path / "empty").mkdir()
    for missing, words in (("nowhere.pt", "no such file"), ("empty", "snapshot there"), ("nowhere", "no ")):
        for arguments in ([str(tmp_path / missing)], [whole, str(tmp_path / missing)]):
            assert main(["verify", *arguments]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith("elastic-mnist: error: ")
            assert str(tmp_path / missing) in line
            assert words in line


def test_a_directory_is_its_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a directory's snapshots the one with the largest step is taken, by number and not by name or time."""
    paths = {step: save(tmp_path, small_state(step)) for step in (100_000_000, 99_999_999, 5)}
    assert main(["verify", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["whole", paths[100_000_000]]
    assert lines[1].split()[:2] == ["step", "100000000,"]

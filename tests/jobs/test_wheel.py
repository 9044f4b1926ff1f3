"""Wheel and sdist: built as for a release, installed where the sources are not."""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from elastic_mnist import __version__

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the sdist and of the wheel that was built from it."""
    directory = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(directory), str(ROOT)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return directory


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs of a fresh environment with the wheel; its dependencies are those of this one."""
    directory = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    programs = directory / "bin"
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--quiet", str(wheel)], check=True)
    (site_packages,) = directory.glob("lib/python*/site-packages")
    # Listed last, and its own .pth files are not read: this package as it is installed there stays out of sight.
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return programs


def run(installed: Path, directory: Path, *command: str) -> str:
    """Run a program of the fresh environment; return its standard output."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    program = [str(installed / command[0]), *command[1:]]
    done = subprocess.run(program, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_is_the_package(built: Path) -> None:
    """The wheel has each file of the package, `py.typed` too, byte for byte, the licence, and nothing else."""
    (path,) = built.glob("*.whl")
    about = f"elastic_mnist-{__version__}.dist-info"
    sources = {
        str(source.relative_to(ROOT)): source.read_bytes()
        for source in (ROOT / "elastic_mnist").rglob("*")
        if source.is_file() and source.parent.name != "__pycache__"
    }
    assert "elastic_mnist/py.typed" in sources
    with zipfile.ZipFile(path) as wheel:
        assert {name: wheel.read(name) for name in wheel.namelist() if not name.startswith(about)} == sources
        assert wheel.read(f"{about}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


def test_the_sdist_is_the_repository(built: Path) -> None:
    """The sdist has what development needs, and nothing that a run, a test or a tool has left."""
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames()}
    assert {"LICENSE", "CHANGELOG.md", "README.md", "pyproject.toml", "scripts/check", "tests/conftest.py"} <= names
    tops = {name.split("/")[0] for name in names} - {"docs"}
    assert {top for top in tops if not top.startswith(".")} == {
        *("LICENSE", "CHANGELOG.md", "README.md", "pyproject.toml", "PKG-INFO", "elastic_mnist", "scripts", "tests"),
    }
    assert {top for top in tops if top.startswith(".")} == {".ci", ".gitignore", ".pre-commit-config.yaml"}


def test_torchrun_finds_the_plug_in(installed: Path, tmp_path: Path) -> None:
    """The entry point of the installed wheel is registered, and leads into the wheel."""
    code = """
from importlib import metadata
(entry,) = (entry for entry in metadata.entry_points(group="torchrun.handlers") if entry.name == "elastic_mnist")
print(entry.value, entry.dist.version, entry.load().__code__.co_filename)
"""
    value, version, path = run(installed, tmp_path, "python", "-c", code).split()
    assert (value, version) == ("elastic_mnist.agent.plugin:install", __version__)
    assert Path(path).is_relative_to(installed.parent)


def test_the_command_line_runs(installed: Path, tmp_path: Path) -> None:
    """`elastic-mnist` is on PATH, and knows its version."""
    assert "verify" in run(installed, tmp_path, "elastic-mnist", "--help")
    assert run(installed, tmp_path, "elastic-mnist", "--version").split() == [__version__]


def test_a_job_trains(installed: Path, tmp_path: Path) -> None:
    """A job under the fresh environment's torchrun trains to its end, and the installed verifier finds it whole."""
    options = "--dataset synthetic --epochs 1 --train_samples 200 --test_samples 50 --global_batch_size 100 --threads 1"
    launcher = "-m torch.distributed.run --standalone -m elastic_mnist --snapshot_path snapshots"
    run(installed, tmp_path, "python", *launcher.split(), *options.split())
    events = [json.loads(line) for line in (tmp_path / "snapshots" / "events.jsonl").read_text().splitlines()]
    assert (events[-1]["event"], events[-1]["step"]) == ("run.finished", 2)
    run(installed, tmp_path, "elastic-mnist", "verify", "snapshots")

"""The console command as a whole: its help, and a reader that closes the pipe."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_mnist.cli.main import main


def test_a_closed_pipe(tmp_path: Path) -> None:
    """When the reader of its output is gone, the command prints no error and exits with the status of a broken pipe."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "elastic_mnist.cli.main", "inspect", str(tmp_path)]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def printed_help(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what `--help` prints."""
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_help_names_every_tool(capsys: pytest.CaptureFixture[str]) -> None:
    """`elastic-mnist --help` lists the tools, the exit statuses and examples; each tool explains its own statuses."""
    text = printed_help(capsys)
    tools = ("inspect", "verify", "export", "audit")
    assert all(word in text for word in (*tools, "Exit status", "examples:"))
    assert all("Ends with" in printed_help(capsys, tool) for tool in tools)

"""A writer is killed in the middle of its writes; a reader finds the old object or the new one, whole."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_mnist.snapshots.storage import LocalStorage

SIZE = 1 << 20
NUM_KILLS = 20

WRITE_ON_AND_ON = """
import sys
from itertools import count
from pathlib import Path
from elastic_mnist.snapshots.storage import LocalStorage

storage = LocalStorage(Path(sys.argv[1]))
for number in count(int(sys.argv[2])):
    print("begins", number, flush=True)
    storage.put("a.pt", number.to_bytes(8, "big") * (int(sys.argv[3]) // 8))
    print("ended", number, flush=True)
"""

KILLED_BEFORE_A_LINE = """
import os, signal, sys
from pathlib import Path
from elastic_mnist.snapshots.storage import local

place, limit = local.LocalStorage(Path(sys.argv[1])), int(sys.argv[2])
num_lines = 0

def trace(frame, kind, value):
    global num_lines
    if frame.f_code.co_filename != local.__file__:
        return None
    if kind == "line":
        if num_lines == limit:
            os.kill(os.getpid(), signal.SIGKILL)
        num_lines += 1
    return trace

etag = place.etag("a.pt")
sys.settrace(trace)
place.put("a.pt", b"new" * 1000) if sys.argv[3] == "put" else place.put_if_match("a.pt", b"new" * 1000, etag)
sys.settrace(None)
"""


def number_of(data: bytes) -> int:
    """Return the number that an object holds, and assert that it is whole."""
    assert len(data) == SIZE
    assert data == data[:8] * (SIZE // 8)
    return int.from_bytes(data[:8], "big")


def test_sigkill_at_any_moment_of_a_run_of_puts_leaves_a_whole_object(tmp_path: Path) -> None:
    """After each of 20 SIGKILLs the object is that of the last put that ended, or of the one that had begun."""
    storage, newest = LocalStorage(tmp_path), 0
    storage.put("a.pt", newest.to_bytes(8, "big") * (SIZE // 8))
    for kill in range(NUM_KILLS):
        command = [sys.executable, "-c", WRITE_ON_AND_ON, str(tmp_path), str(newest + 1), str(SIZE)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            told = [writer.stdout.readline() for _ in range(1 + kill)]  # ends as a put begins, or as one has ended
            writer.kill()
            told += writer.stdout
        assert writer.returncode == -signal.SIGKILL
        begun = [int(line.split()[1]) for line in told if line.startswith("begins")]
        ended = [int(line.split()[1]) for line in told if line.startswith("ended")]
        number = number_of(storage.get("a.pt"))
        assert max([newest, *ended]) <= number <= max(begun)
        newest = number


@pytest.mark.parametrize("operation", ["put", "put_if_match"])
def test_sigkill_before_any_line_of_a_put_leaves_the_old_object_or_the_new_one(operation: str, tmp_path: Path) -> None:
    """Killed before each line in turn, a writer leaves the old bytes or, from its commit on, the new ones; no lock."""
    found, num_leftovers = [], 0
    for limit in range(1000):
        place = tmp_path / str(limit)
        storage = LocalStorage(place)
        storage.create()
        storage.put("a.pt", b"old")
        command = [sys.executable, "-c", KILLED_BEFORE_A_LINE, str(place), str(limit), operation]
        writer = subprocess.run(command, check=False)
        if writer.returncode == 0:  # it has no more lines
            break
        assert writer.returncode == -signal.SIGKILL
        found.append(storage.get("a.pt"))
        num_leftovers += len(list(place.iterdir())) - 1
        assert storage.names() == ["a.pt"]
        storage.put_if_match("b.pt", b"x", None)  # at once: whoever was killed keeps nobody out
    num_new = found.count(b"new" * 1000)
    assert found == [b"old"] * (len(found) - num_new) + [b"new" * 1000] * num_new
    assert num_leftovers > 0  # some moments lay in the middle of a write
    assert 0 < num_new < len(found)  # and some on either side of its commit

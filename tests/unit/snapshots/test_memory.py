"""The memory tier: what is kept is read back whole, whatever kills the writer."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import FrameType

import pytest
import torch
from harness import eventually
from states import run_config, small_state
from structlog.testing import capture_logs

from elastic_mnist.snapshots import memory
from elastic_mnist.snapshots.memory import MemorySnapshot, MemoryTier
from elastic_mnist.snapshots.record import RunRecord
from elastic_mnist.snapshots.state import State, pack

RECORD = RunRecord.new(run_config(), started_at=1.0)


@pytest.fixture
def path() -> Iterator[str]:
    """A memory as an agent holds it."""
    descriptor = os.memfd_create("test")
    yield f"/proc/{os.getpid()}/fd/{descriptor}"
    os.close(descriptor)


def held_at(path: str) -> MemorySnapshot:
    """Return what lies there, which must be something."""
    held = memory.read(path)
    assert held is not None
    return held


def test_a_state_is_read_as_it_was_kept(path: str) -> None:
    """State and record come back, down to the bytes of a snapshot of them."""
    MemoryTier(path, RECORD).put(small_state(5))
    held = held_at(path)
    assert pack(held.state) == pack(small_state(5))
    assert (held.record, held.position.step) == (RECORD, 5)


def test_tensors_of_all_kinds_are_read_as_they_were_kept(path: str) -> None:
    """Scalars, empty ones, those that are views, and every type that a state may have."""
    state = small_state()
    state["model"] = {
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "view": torch.arange(12.0).view(3, 4).t()[1:],
        "bf16": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "int64": torch.tensor([[-1, 2**62]]),
        "bool": torch.tensor([True, False]),
        "uint8": torch.arange(7, dtype=torch.uint8),
    }
    MemoryTier(path, RECORD).put(state)
    read = held_at(path).state["model"]
    assert read.keys() == state["model"].keys()
    for name, tensor in state["model"].items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert read[name].flatten().view(torch.uint8).equal(tensor.contiguous().flatten().view(torch.uint8))


def test_the_newest_state_is_read(path: str) -> None:
    """Of each number of states kept, the last."""
    tier = MemoryTier(path, RECORD)
    for step in range(1, 8):
        tier.put(small_state(step))
        assert held_at(path).position.step == step


def test_what_was_kept_does_not_follow_the_training(path: str) -> None:
    """A weight that changes afterwards leaves the copy as it was."""
    state = small_state(5)
    MemoryTier(path, RECORD).put(state)
    state["model"]["weight"].zero_()
    assert held_at(path).state["model"]["weight"].equal(small_state(5)["model"]["weight"])


def test_what_was_read_does_not_follow_the_memory(path: str) -> None:
    """A state that was read stays as it was when later ones are kept."""
    tier = MemoryTier(path, RECORD)
    tier.put(small_state(5))
    held = held_at(path)
    for step in (6, 7, 8):
        tier.put(small_state(step))
    assert pack(held.state) == pack(small_state(5))


def test_a_new_worker_keeps_the_old_ones_state_until_it_has_one_of_its_own(path: str) -> None:
    """The next generation's first state goes over the older of the two, and counts as newer than both."""
    old = MemoryTier(path, RECORD)
    for step in (5, 6):
        old.put(small_state(step))
    new = MemoryTier(path, RECORD.next_generation(num_lost_steps=1, contract=RECORD.contract))
    new.put(small_state(3))
    assert (held_at(path).position.step, held_at(path).record.generation) == (3, 1)


def test_an_empty_memory_holds_nothing(path: str) -> None:
    """Before the first state there is none."""
    assert memory.read(path) is None


@pytest.mark.parametrize("content", [b"x", b"x" * 4096, b"\0" * 100_000, os.urandom(100_000)])
def test_what_is_no_memory_tier_holds_nothing(content: bytes, path: str) -> None:
    """Another program's bytes are no state, and the first state kept there is read."""
    Path(path).write_bytes(content)
    assert memory.read(path) is None
    MemoryTier(path, RECORD).put(small_state(5))
    assert held_at(path).position.step == 5


def test_a_state_of_another_size_takes_the_place(path: str) -> None:
    """A larger network's state is kept where a smaller one's lay."""
    MemoryTier(path, RECORD).put(small_state(5))
    larger = small_state(6, model={"weight": torch.arange(100_000.0)})
    MemoryTier(path, RECORD).put(larger)
    assert pack(held_at(path).state) == pack(larger)


def test_a_state_that_grows_is_kept_whole(path: str) -> None:
    """A state before the optimizer's first step has no moments; the next one, which has, is no trouble."""
    tier = MemoryTier(path, RECORD)
    for step in (0, 1):
        tier.put(small_state(step, optimizer={"state": {}, "param_groups": []}))
    for step in (2, 3, 4):
        grown = small_state(step, optimizer={"state": {0: {"exp_avg": torch.arange(100_000.0)}}, "param_groups": []})
        tier.put(grown)
        assert pack(held_at(path).state) == pack(grown)


def test_released_memory_is_empty(path: str) -> None:
    """After the end of a run nothing is held, and nothing is kept any more."""
    tier = MemoryTier(path, RECORD)
    tier.put(small_state(5))
    tier.release()
    assert Path(path).stat().st_size == 0
    tier.put(small_state(6))
    assert memory.read(path) is None


def test_no_room_is_told_once_and_the_training_goes_on(tmp_path: Path) -> None:
    """On a file system of 64 KiB the tier says once that it is not there, and why, and leaves nothing."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", mount], check=True)
    try:
        file = mount / "memory"
        file.touch()
        tier = MemoryTier(str(file), RECORD)
        with capture_logs() as events:
            for step in (1, 2, 3):
                tier.put(small_state(step))
        (told,) = events
        assert (told["event"], told["log_level"]) == ("memory.unavailable", "warning")
        assert told["reason"].startswith("No space left on device; ")
        assert file.stat().st_size == 0
        assert memory.read(str(file)) is None
    finally:
        subprocess.run(["umount", mount], check=True)


def test_a_memory_whose_holder_is_gone_holds_nothing_and_is_told(path: str) -> None:
    """Without its agent the path leads nowhere: nothing is read, and keeping a state is told and done without."""
    nowhere = path + "0000"
    assert memory.read(nowhere) is None
    with capture_logs() as events:
        MemoryTier(nowhere, RECORD).put(small_state(5))
    assert [event["event"] for event in events] == ["memory.unavailable"]


def steady_state(step: int) -> State:
    """Return a state all of whose tensors are full of its step: a mixture of two would show."""
    return small_state(
        step,
        model={f"weight{index}": torch.full((50_000,), float(step)) for index in range(4)},
        optimizer={"state": {0: {"exp_avg": torch.full((200_000,), float(step))}}, "param_groups": []},
    )


def step_of(held: MemorySnapshot) -> int:
    """Return the step that was read, after a look at every value."""
    step = held.position.step
    assert pack(held.state) == pack(steady_state(step))
    return step


KEEP_ON_AND_ON = """
import sys
from itertools import count
sys.path[:0] = {paths!r}
from test_memory import RECORD, steady_state
from elastic_mnist.snapshots.memory import MemoryTier

tier = MemoryTier(sys.argv[1], RECORD)
for step in count(int(sys.argv[2])):
    state = steady_state(step)
    print("begins", step, flush=True)
    tier.put(state)
    print("ended", step, flush=True)
"""


def test_sigkill_at_any_moment_leaves_a_whole_state(path: str) -> None:
    """After each of 20 SIGKILLs the last state whose writing had ended is there, or the one that had begun; whole."""
    program = KEEP_ON_AND_ON.format(paths=sys.path)
    choose = random.Random(1)  # noqa: S311 - repeatable, not secret
    newest = 0
    for _ in range(20):
        with subprocess.Popen(
            [sys.executable, "-c", program, path, str(newest + 1)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            lines = [writer.stdout.readline().split() for _ in range(choose.randrange(1, 60))]
            writer.send_signal(signal.SIGKILL)
            lines += map(str.split, writer.stdout.read().splitlines())
        assert writer.returncode == -signal.SIGKILL
        begun = max(int(words[1]) for words in lines if words[0] == "begins" and len(words) == 2)
        ended = max([newest, *(int(words[1]) for words in lines if words[0] == "ended" and len(words) == 2)])
        newest = step_of(held_at(path))
        assert newest in (ended, begun)


class _Dies(BaseException):
    """Ends a writer as a kill would."""


class _Death:
    """A trace function that ends a writer before the n-th line of its module, as a kill would."""

    def __init__(self, num_lines: int) -> None:
        self._num_lines = num_lines

    def __call__(self, frame: FrameType, kind: str, _value: object) -> "_Death | None":
        """Count a line, or die."""
        if frame.f_code.co_filename != memory.__file__:
            return None
        if kind == "line":
            if self._num_lines == 0:
                raise _Dies
            self._num_lines -= 1
        return self


def test_death_between_any_two_stores_leaves_the_state_before(path: str) -> None:
    """A writer that dies before any of its lines leaves the last state, or the new one where it had finished."""
    tier = MemoryTier(path, RECORD)
    for step in (1, 2):
        tier.put(steady_state(step))
    found = []
    for num_lines in count():
        before = step_of(held_at(path))
        writer, state = MemoryTier(path, RECORD), steady_state(before + 1)
        died = False
        sys.settrace(_Death(num_lines))
        try:
            writer.put(state)
        except _Dies:
            died = True
        finally:
            sys.settrace(None)
        found.append(step_of(held_at(path)) - before)
        if not died:
            break
    assert (found[0], found[-1]) == (0, 1)
    assert set(found) == {0, 1}
    assert len(found) > 30


def test_the_memory_ends_with_its_holder() -> None:
    """When the process that holds it is killed, no path leads to it any more."""
    holder = subprocess.Popen(
        [sys.executable, "-c", "import os; print(os.memfd_create('test'), flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    path = f"/proc/{holder.pid}/fd/{int(holder.stdout.readline())}"
    MemoryTier(path, RECORD).put(small_state(5))
    assert held_at(path).position.step == 5
    holder.kill()
    holder.communicate()
    eventually(lambda: not os.path.lexists(path))
    assert memory.read(path) is None

"""`elastic-mnist audit`: valid where each sample was used once, invalid with the evidence, unknown without it.

The ledgers are written by the real ledger from the real sampler; then one thing is made wrong.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elastic_mnist.cli import audit
from elastic_mnist.telemetry.sample_log import SampleLog
from elastic_mnist.training.sampler import Position, StepSampler

NUM_SAMPLES, GLOBAL_BATCH, MICRO_BATCH, SEED = 23, 8, 3, 4
STEPS_PER_EPOCH = 3  # of 8, 8 and 7 samples, each in 3 micro-batches
RUN_ID = "0123456789ab"

Line = dict[str, Any]


@dataclass(frozen=True)
class Life:
    """One generation: what it went on from, and how many steps were finished when it ended."""

    world_size: int
    first_step: int
    end_step: int


# A generation dies at step 4 of which 2 were saved; the next ones have other world sizes.
LIVES = (Life(3, 0, 4), Life(1, 2, 4), Life(2, 4, 6))


class Run:
    """The ledgers and the event log of a run of 2 epochs, in a directory of its own."""

    def __init__(self, root: Path, lives: Iterable[Life] = LIVES, *, is_finished: bool = True) -> None:
        self.directory = root / "ledger"
        self.event_log = root / "events.jsonl"
        self.run_id = RUN_ID
        for generation, life in enumerate(lives):
            self.live(generation, life)
        if is_finished:
            self.tell("run.finished", generation=generation, step=life.end_step)

    def live(self, generation: int, life: Life) -> None:
        """Let one generation work, as its ranks would."""
        self.tell(
            "run.started",
            generation=generation,
            world_size=life.world_size,
            step=life.first_step,
            num_train_samples=NUM_SAMPLES,
            global_batch_size=GLOBAL_BATCH,
            micro_batch_size=MICRO_BATCH,
        )
        if generation > 0 or life.first_step > 0:
            self.tell("run.resumed", generation=generation, step=life.first_step)
        for rank in range(life.world_size):
            ledger = SampleLog(self.directory, rank=rank, run_id=self.run_id, generation=generation)
            position = Position(
                epoch=life.first_step // STEPS_PER_EPOCH,
                samples_in_epoch=life.first_step % STEPS_PER_EPOCH * GLOBAL_BATCH,
                step=life.first_step,
            )
            while position.step < life.end_step:
                for step in StepSampler(
                    NUM_SAMPLES,
                    seed=SEED,
                    epoch=position.epoch,
                    start=position.samples_in_epoch,
                    global_batch_size=GLOBAL_BATCH,
                    micro_batch_size=MICRO_BATCH,
                    rank=rank,
                    world_size=life.world_size,
                ):
                    if position.step < life.end_step:
                        ledger.append(
                            epoch=step.epoch,
                            step=position.step,
                            micro_batches={batch.index: batch.samples.tolist() for batch in step.micro_batches},
                        )
                        position = position.after(step, NUM_SAMPLES)

    def tell(self, event: str, **keys: Any) -> None:  # noqa: ANN401 - the values of a JSON object
        """Append to the event log."""
        with self.event_log.open("a") as log:
            log.write(json.dumps({"event": event, "run_id": self.run_id, **keys}) + "\n")

    def path(self, rank: int) -> Path:
        """Return where a rank's ledger is."""
        return self.directory / f"rank-{rank:05d}.jsonl"

    def lines(self, rank: int) -> list[Line]:
        """Return a rank's ledger."""
        return [json.loads(line) for line in self.path(rank).read_text().splitlines()]

    def line(self, rank: int, generation: int, step: int) -> Line:
        """Return a rank's first line of a step."""
        return next(at for at in self.lines(rank) if (at["generation"], at["step"]) == (generation, step))

    def change(self, rank: int, generation: int, step: int, change: Callable[[Line], list[Line]]) -> None:
        """Put what `change` returns in the place of a rank's first line of a step."""
        lines = self.lines(rank)
        index = lines.index(self.line(rank, generation, step))
        lines[index : index + 1] = change(lines[index])
        self.path(rank).write_text("".join(json.dumps(line) + "\n" for line in lines))

    def audit(self, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
        """Return the exit status and the lines of the real tool."""
        status = audit.run(self.directory, event_log=None, run_id=None)
        return status, capsys.readouterr().out.splitlines()


def found(lines: list[str], kind: str) -> list[str]:
    """Return the findings of a kind; the first line is the verdict."""
    return [line.removeprefix(kind).strip() for line in lines[1:] if line.startswith(kind)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_an_undisturbed_run_is_valid(world_size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Any number of ranks, also more than there are micro-batches: all steps and samples are counted."""
    status, lines = Run(tmp_path, [Life(world_size, 0, 6)]).audit(capsys)
    assert status == 0
    assert [line.split(maxsplit=1)[-1].strip() for line in lines] == [
        f"run {RUN_ID}",
        f"committed steps with {2 * NUM_SAMPLES} samples",
        "whole epochs",
    ]
    assert lines[0].startswith("valid")
    assert lines[1].split()[0] == "6"
    assert lines[2].split()[0] == "2"


@pytest.mark.parametrize(
    ("lives", "replayed"),
    [
        (LIVES, {0: 2}),
        ((Life(2, 0, 5), Life(2, 0, 6)), {0: 5}),
        ((Life(2, 0, 4), Life(1, 3, 5), Life(3, 3, 5), Life(2, 4, 6)), {0: 1, 1: 2, 2: 1}),
        ((Life(2, 0, 4), Life(1, 3, 5), Life(3, 1, 6)), {0: 3, 1: 2}),
        ((Life(2, 0, 3), Life(1, 3, 3), Life(3, 3, 6)), {}),
    ],
    ids=["shrinks", "starts over", "falls back twice", "falls back behind a fallback", "dies at once"],
)
def test_steps_made_again_count_once(lives: tuple[Life, ...], replayed: dict[int, int], tmp_path: Path) -> None:
    """Generations that go on from a snapshot, in other worlds: valid, and each lost step is told where it was lost."""
    run = Run(tmp_path, lives)
    events = [json.loads(line) for line in run.event_log.read_text().splitlines()]
    paths = sorted(run.directory.iterdir())
    entries = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    report = audit.audit(events, entries)
    assert (report.verdict, report.invalid, report.unknown) == ("valid", [], [])
    assert report.replayed == replayed
    assert (report.num_epochs, report.num_steps, report.num_samples) == (2, 6, 2 * NUM_SAMPLES)


def test_steps_made_again_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tool says which generation lost how many steps."""
    status, lines = Run(tmp_path).audit(capsys)
    assert status == 0
    assert lines[3:] == ["          generation 0: 2 steps did not count and were made again"]


def test_skipped_steps_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step that was skipped counts as made, and is named; one that was made again without a fault is not."""
    run = Run(tmp_path)
    run.tell("step.skipped", generation=0, step=1)
    run.tell("step.skipped", generation=0, step=3)  # lost, and made again by generation 1
    status, lines = run.audit(capsys)
    assert status == 0
    assert lines[4:] == ["          1 of the steps had no finite gradient and were skipped: 1"]


def _swap_first(line: Line, sample: int) -> list[Line]:
    return [{**line, "indices": [sample, *line["indices"][1:]]}]


# Where step 3 (epoch 1, generation 1, rank 0) is made wrong, and what has to be said of it.
BUGS: dict[str, tuple[Callable[[Line], list[Line]], list[str]]] = {
    "a sample twice": (
        lambda line: _swap_first(line, line["indices"][1]),
        ["epoch 1: 1 samples not used: ", "epoch 1: 1 samples used more than once: "],
    ),
    "a sample missing": (
        lambda line: [{**line, "indices": line["indices"][1:]}],
        ["epoch 1: 1 samples not used: "],
    ),
    "a micro-batch missing": (
        lambda _: [],
        ["step 3 (generation 1): micro-batches [0] are missing", "epoch 1: 3 samples not used: "],
    ),
    "a micro-batch twice": (
        lambda line: [line, line],
        ["step 3 (generation 1): micro-batch 0 was computed 2 times, by ranks [0, 0]", "epoch 1: 3 samples used more"],
    ),
    "a sample outside the set": (
        lambda line: _swap_first(line, NUM_SAMPLES),
        ["epoch 1: 1 samples not used: ", f"epoch 1: 1 samples not in the set: {NUM_SAMPLES}"],
    ),
    "a negative sample": (
        lambda line: _swap_first(line, -1),
        ["epoch 1: 1 samples not used: ", "epoch 1: 1 samples not in the set: -1"],
    ),
    "another epoch's number": (
        lambda line: [{**line, "epoch": 0}],
        ["step 3 (generation 1): is of epoch 1, the ledger says another", "epoch 1: 3 samples not used: ", "epoch 0"],
    ),
    "a micro-batch that is none": (
        lambda line: [line, {**line, "micro_batch": 3}],
        ["epoch 1: 3 samples used more than once: "],
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_in_a_committed_step_is_invalid(bug: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One wrong line makes the run invalid, and the findings name its step or its epoch, and the sample."""
    change, findings = BUGS[bug]
    run = Run(tmp_path)
    run.change(0, 1, 3, change)
    status, lines = run.audit(capsys)
    assert status == 1
    assert lines[0].startswith("invalid")
    told = found(lines, "invalid")
    for finding in findings:
        assert any(line.startswith(finding) for line in told), told
    assert len(told) == len(findings)


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_in_a_step_that_was_made_again_is_no_matter(
    bug: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same wrong line in a step that did not count leaves the run valid."""
    run = Run(tmp_path)
    run.change(0, 0, 3, BUGS[bug][0])
    assert run.audit(capsys)[0] == 0


def test_two_ranks_at_one_micro_batch_are_invalid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A micro-batch that two ranks computed is told with both ranks, and its samples as used twice."""
    run = Run(tmp_path)
    stolen = {**run.line(0, 2, 4), "rank": 1}
    run.change(1, 2, 4, lambda line: [stolen, line])
    status, lines = run.audit(capsys)
    assert status == 1
    assert found(lines, "invalid")[0] == ("step 4 (generation 2): micro-batch 0 was computed 2 times, by ranks [0, 1]")
    used = ", ".join(map(str, sorted(stolen["indices"])))
    assert found(lines, "invalid")[1:] == [f"epoch 1: 3 samples used more than once: {used}"]


def test_another_epochs_order_is_invalid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A micro-batch whose samples come from epoch 0's order, logged under epoch 1, is told as epoch 1's."""
    run = Run(tmp_path)
    old = run.line(0, 0, 0)["indices"]
    run.change(0, 1, 3, lambda line: [{**line, "indices": old}])
    status, lines = run.audit(capsys)
    assert status == 1
    told = found(lines, "invalid")
    assert {line.split(":")[0] for line in told} == {"epoch 1"}
    assert any("not used" in line for line in told)
    assert any("used more than once" in line for line in told)


def test_steps_that_went_uncounted_in_a_fallback_are_invalid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A generation that goes on two steps later than it says leaves a hole, which is told by its steps."""
    run = Run(tmp_path, (Life(2, 0, 2), Life(2, 4, 6)), is_finished=False)
    text = run.event_log.read_text().replace('"step": 4', '"step": 2')
    run.event_log.write_text(text)
    run.tell("run.finished", generation=1, step=6)
    status, lines = run.audit(capsys)
    assert status == 1
    assert found(lines, "invalid")[:2] == [
        f"step {step} (generation 1): micro-batches [0, 1, 2] are missing" for step in (2, 3)
    ]


def test_a_sample_twice_in_the_rest_of_an_epoch_is_invalid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a run took an epoch over from a file in its middle, a sample used twice in the rest is found."""
    run = Run(tmp_path, [Life(1, 1, 6)])
    assert run.audit(capsys)[0] == 0
    run.change(0, 0, 1, lambda line: _swap_first(line, line["indices"][1]))
    status, lines = run.audit(capsys)
    assert status == 1
    assert any("epoch 0" in line for line in found(lines, "invalid"))


def test_a_missing_ledger_is_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a rank's file is gone nothing is called wrong; the step and the rank are named."""
    run = Run(tmp_path)
    run.path(1).unlink()
    status, lines = run.audit(capsys)
    assert status == 3
    assert lines[0].startswith("unknown")
    assert not found(lines, "invalid")
    told = found(lines, "unknown")
    assert "step 0 (generation 0): micro-batches [1] are missing; the ledger of rank 1 is missing" in told


def test_a_bug_beside_a_missing_ledger_is_invalid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sample that was used twice is proof enough, whatever else is missing."""
    run = Run(tmp_path)
    run.path(1).unlink()
    run.change(0, 1, 3, lambda line: _swap_first(line, line["indices"][1]))
    status, lines = run.audit(capsys)
    assert status == 1
    assert any("used more than once" in line for line in found(lines, "invalid"))


def test_an_unreadable_line_that_is_needed_is_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line of a committed step that cannot be read is named; what it held is not called missing."""
    run = Run(tmp_path)
    text = run.path(0).read_text().splitlines()
    number = next(i for i, line in enumerate(text) if '"generation": 1' in line)
    text[number] = text[number][:-20]
    run.path(0).write_text("\n".join(text) + "\n")
    status, lines = run.audit(capsys)
    assert any(f"rank-00000.jsonl line {number + 1} is not readable" in line for line in found(lines, "unknown"))
    assert not found(lines, "invalid")
    assert status == 3


def test_a_run_that_has_not_ended_is_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without `run.finished` there is no verdict yet."""
    status, lines = Run(tmp_path, is_finished=False).audit(capsys)
    assert status == 3
    assert found(lines, "unknown") == ["the event log does not tell of the run's end"]


def test_a_generation_without_a_beginning_in_the_log_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A generation of which only the ledgers tell is named, and its steps are not called missing."""
    run = Run(tmp_path)
    events = [json.loads(line) for line in run.event_log.read_text().splitlines()]
    kept = [event for event in events if event["generation"] != 2 or event["event"] == "run.finished"]
    run.event_log.write_text("".join(json.dumps(event) + "\n" for event in kept))
    status, lines = run.audit(capsys)
    assert "generation 2 is in the ledgers only" in found(lines, "unknown")
    assert not found(lines, "invalid")
    assert status == 3


def test_a_generation_killed_before_it_said_where_it_goes_on_from_is_not_invalid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A generation that died between `run.started` and `run.resumed` is no reason to call the run invalid."""
    run = Run(tmp_path, (Life(2, 0, 4), Life(2, 3, 3), Life(2, 3, 6)))
    events = run.event_log.read_text().splitlines()
    resumed = [line for line in events if '"run.resumed"' in line and '"generation": 1' in line]
    assert len(resumed) == 1
    run.event_log.write_text("".join(line + "\n" for line in events if line not in resumed))
    status, lines = run.audit(capsys)
    assert not found(lines, "invalid")
    assert status != 1


def _tear(run: Run, generation: int, life: Life) -> None:
    """Cut the last line of rank 0 in two, as a lost machine would, before the next generation goes on."""
    data = run.path(0).read_bytes()
    run.path(0).write_bytes(data[:-25])
    run.live(generation, life)


def test_a_torn_line_spoils_none_of_the_next_generations(tmp_path: Path) -> None:
    """What is appended after a half-written line stands on lines of its own, each of them readable."""
    run = Run(tmp_path, [Life(1, 0, 4)], is_finished=False)
    num_whole = len(run.path(0).read_text().splitlines()) - 1
    _tear(run, 1, Life(1, 3, 6))
    lines = run.path(0).read_text().splitlines()
    with pytest.raises(json.JSONDecodeError):
        json.loads(lines.pop(num_whole))
    entries = [json.loads(line) for line in lines]
    assert [entry["step"] for entry in entries if entry["generation"] == 1] == [3, 3, 3, 4, 4, 4, 5, 5, 5]
    assert len([entry for entry in entries if entry["generation"] == 0]) == num_whole


def test_a_torn_line_of_a_step_that_was_made_again_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where every committed step has all its samples, a torn line between them takes nothing from the verdict."""
    run = Run(tmp_path, [Life(1, 0, 4)], is_finished=False)
    _tear(run, 1, Life(1, 3, 6))
    run.tell("run.finished", generation=1, step=6)
    status, lines = run.audit(capsys)
    assert not found(lines, "invalid")
    assert status == 0


def test_other_runs_in_the_same_files_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ledgers and log that another run had begun: the last one is judged, and the other one where it is named."""
    run = Run(tmp_path, [Life(1, 0, 4)], is_finished=False)
    run.run_id = "ba9876543210"
    run.live(0, Life(2, 0, 6))
    run.tell("run.finished", generation=0, step=6)
    status, lines = run.audit(capsys)
    assert (status, lines[0].split()) == (0, ["valid", "run", "ba9876543210"])
    assert audit.run(run.directory, event_log=run.event_log, run_id=RUN_ID) == 3


def tool(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    """Run the console command."""
    command = [sys.executable, "-m", "elastic_mnist.cli.main", "audit", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_exit_status(tmp_path: Path) -> None:
    """The command ends with 0 for valid, 1 for invalid and 3 for unknown, and prints the verdict first."""
    valid, invalid, unknown = (Run(tmp_path / name) for name in _made(tmp_path, "valid", "invalid", "unknown"))
    invalid.change(0, 1, 3, lambda _: [])
    unknown.path(1).unlink()
    for run, verdict, status in ((valid, "valid", 0), (invalid, "invalid", 1), (unknown, "unknown", 3)):
        done = tool(run.directory, "--event_log", run.event_log)
        assert done.returncode == status, done.stderr
        assert done.stdout.startswith(f"{verdict} ")
        assert done.stderr == ""


def _made(root: Path, *names: str) -> tuple[str, ...]:
    for name in names:
        (root / name).mkdir()
    return names


def test_what_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    """No ledgers, no event log beside them, one that is named and not there: status 2 and one line with the way out."""
    run = Run(tmp_path / _made(tmp_path, "run")[0])
    (nothing,) = _made(tmp_path, "nothing")
    alone = tmp_path / "far" / "away" / "ledger"
    shutil.copytree(run.directory, alone)
    for arguments, words in (
        ((tmp_path / nothing, "--event_log", run.event_log), ("no ledgers there", "--sample_log")),
        ((tmp_path / "nowhere", "--event_log", run.event_log), ("no ledgers there", "--sample_log")),
        ((alone,), ("no event log beside it", RUN_ID, "--event_log")),
        ((alone, "--event_log", run.event_log, "--run_id", "other"), ("does not tell of run other", "--run_id")),
        ((run.directory, "--event_log", tmp_path / "nowhere"), ("--event_log", "nowhere", "No such file")),
    ):
        done = tool(*arguments)
        assert done.returncode == 2, done.stdout
        (line,) = done.stderr.splitlines()
        assert line.startswith("elastic-mnist: error: ")
        for word in words:
            assert word in line

"""The audit: valid where each sample was used once, invalid with the evidence, unknown without it.

The sample logs are written by the real class from the real sampler; then one thing is made wrong.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from sample_logs import GENERATIONS, NUM_SAMPLES, RUN_ID, Generation, Line, LoggedRun

from elastic_mnist.telemetry.audit import Report, audit_files


def audit(run: LoggedRun) -> Report:
    """Return the report on a run."""
    return audit_files(run.directory).report


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_an_undisturbed_run_is_valid(world_size: int, tmp_path: Path) -> None:
    """With any number of ranks, also more than micro-batches, all steps and samples are counted."""
    report = audit(LoggedRun(tmp_path, [Generation(world_size, 0, 6)]))
    assert (report.verdict, report.invalid, report.unknown, report.replayed) == ("valid", [], [], {})
    assert (report.num_epochs, report.num_steps, report.num_samples) == (2, 6, 2 * NUM_SAMPLES)


@pytest.mark.parametrize(
    ("generations", "replayed"),
    [
        (GENERATIONS, {0: 2}),
        ((Generation(2, 0, 5), Generation(2, 0, 6)), {0: 5}),
        (
            (Generation(2, 0, 4), Generation(1, 3, 5), Generation(3, 3, 5), Generation(2, 4, 6)),
            {0: 1, 1: 2, 2: 1},
        ),
        ((Generation(2, 0, 4), Generation(1, 3, 5), Generation(3, 1, 6)), {0: 3, 1: 2}),
        ((Generation(2, 0, 3), Generation(1, 3, 3), Generation(3, 3, 6)), {}),
    ],
    ids=["shrinks", "starts over", "falls back twice", "falls back behind a fallback", "dies at once"],
)
def test_steps_made_again_count_once(
    generations: tuple[Generation, ...], replayed: dict[int, int], tmp_path: Path
) -> None:
    """Generations that resume in other worlds are valid; each lost step is counted for the generation that lost it."""
    report = audit(LoggedRun(tmp_path, generations))
    assert (report.verdict, report.invalid, report.unknown) == ("valid", [], [])
    assert report.replayed == replayed
    assert (report.num_epochs, report.num_steps, report.num_samples) == (2, 6, 2 * NUM_SAMPLES)


def test_skipped_steps_are_named(tmp_path: Path) -> None:
    """A skipped step counts as committed, and is named; one that was repeated without a fault is not."""
    run = LoggedRun(tmp_path)
    run.log("step.skipped", generation=0, step=1)
    run.log("step.skipped", generation=0, step=3)  # lost, and repeated by generation 1
    report = audit(run)
    assert (report.verdict, report.skipped) == ("valid", [1])


def _swap_first(line: Line, sample: int) -> list[Line]:
    return [{**line, "indices": [sample, *line["indices"][1:]]}]


# How step 3 (epoch 1, generation 1, rank 0) is made wrong, and the findings that must follow.
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
        ["step 3 (generation 1): is of epoch 1, the sample log", "epoch 1: 3 samples not used: ", "epoch 0"],
    ),
    "a micro-batch that is none": (
        lambda line: [line, {**line, "micro_batch": 3}],
        ["epoch 1: 3 samples used more than once: "],
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_in_a_committed_step_is_invalid(bug: str, tmp_path: Path) -> None:
    """One wrong line makes the run invalid, and the findings name its step or its epoch, and the sample."""
    change, findings = BUGS[bug]
    run = LoggedRun(tmp_path)
    run.change(0, 1, 3, change)
    report = audit(run)
    assert report.verdict == "invalid"
    for finding in findings:
        assert any(text.startswith(finding) for text in report.invalid), report.invalid
    assert len(report.invalid) == len(findings)


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_in_a_step_that_was_made_again_is_no_matter(bug: str, tmp_path: Path) -> None:
    """The same wrong line in a step that did not count leaves the run valid."""
    run = LoggedRun(tmp_path)
    run.change(0, 0, 3, BUGS[bug][0])
    assert audit(run).verdict == "valid"


def test_two_ranks_at_one_micro_batch_are_invalid(tmp_path: Path) -> None:
    """A micro-batch that two ranks computed is named with both ranks, and its samples as used twice."""
    run = LoggedRun(tmp_path)
    stolen = {**run.line(0, 2, 4), "rank": 1}
    run.change(1, 2, 4, lambda line: [stolen, line])
    used = ", ".join(map(str, sorted(stolen["indices"])))
    assert audit(run).invalid == [
        "step 4 (generation 2): micro-batch 0 was computed 2 times, by ranks [0, 1]",
        f"epoch 1: 3 samples used more than once: {used}",
    ]


def test_another_epochs_order_is_invalid(tmp_path: Path) -> None:
    """A micro-batch whose samples come from epoch 0's order, logged under epoch 1, is reported as epoch 1's."""
    run = LoggedRun(tmp_path)
    old = run.line(0, 0, 0)["indices"]
    run.change(0, 1, 3, lambda line: [{**line, "indices": old}])
    report = audit(run)
    assert {finding.split(":")[0] for finding in report.invalid} == {"epoch 1"}
    assert any("not used" in finding for finding in report.invalid)
    assert any("used more than once" in finding for finding in report.invalid)


def test_steps_that_went_uncounted_in_a_fallback_are_invalid(tmp_path: Path) -> None:
    """A generation that resumes two steps later than it logs leaves a hole, and the hole's steps are named."""
    run = LoggedRun(tmp_path, (Generation(2, 0, 2), Generation(2, 4, 6)), is_finished=False)
    run.event_log.write_text(run.event_log.read_text().replace('"step": 4', '"step": 2'))
    run.log("run.finished", generation=1, step=6)
    assert audit(run).invalid[:2] == [
        f"step {step} (generation 1): micro-batches [0, 1, 2] are missing" for step in (2, 3)
    ]


def test_a_sample_twice_in_the_rest_of_an_epoch_is_invalid(tmp_path: Path) -> None:
    """Where a run resumed from a file in mid-epoch, a sample used twice in the rest is found."""
    run = LoggedRun(tmp_path, [Generation(1, 1, 6)])
    assert audit(run).verdict == "valid"
    run.change(0, 0, 1, lambda line: _swap_first(line, line["indices"][1]))
    assert any("epoch 0" in finding for finding in audit(run).invalid)


def test_a_missing_sample_log_is_unknown(tmp_path: Path) -> None:
    """Where a rank's file is gone nothing is called wrong; the step and the rank are named."""
    run = LoggedRun(tmp_path)
    run.path(1).unlink()
    report = audit(run)
    assert (report.verdict, report.invalid) == ("unknown", [])
    assert "step 0 (generation 0): micro-batches [1] are missing; the sample log of rank 1 is missing" in report.unknown


def test_a_bug_beside_a_missing_sample_log_is_invalid(tmp_path: Path) -> None:
    """A sample that was used twice is proof enough, whatever else is missing."""
    run = LoggedRun(tmp_path)
    run.path(1).unlink()
    run.change(0, 1, 3, lambda line: _swap_first(line, line["indices"][1]))
    assert any("used more than once" in finding for finding in audit(run).invalid)


def test_an_unreadable_line_that_is_needed_is_unknown(tmp_path: Path) -> None:
    """A line of a committed step that cannot be read is named; what it held is not called missing."""
    run = LoggedRun(tmp_path)
    text = run.path(0).read_text().splitlines()
    number = next(i for i, line in enumerate(text) if '"generation": 1' in line)
    text[number] = text[number][:-20]
    run.path(0).write_text("\n".join(text) + "\n")
    report = audit(run)
    assert any(f"rank-00000.jsonl line {number + 1} is not readable" in finding for finding in report.unknown)
    assert (report.verdict, report.invalid) == ("unknown", [])


def test_a_run_that_has_not_ended_is_unknown(tmp_path: Path) -> None:
    """Without `run.finished` there is no verdict yet."""
    report = audit(LoggedRun(tmp_path, is_finished=False))
    assert (report.verdict, report.unknown) == ("unknown", ["the event log does not tell of the run's end"])


def test_a_generation_without_a_beginning_in_the_log_is_unknown(tmp_path: Path) -> None:
    """A generation that only the sample logs have is named, and its steps are not called missing."""
    run = LoggedRun(tmp_path)
    events = [json.loads(line) for line in run.event_log.read_text().splitlines()]
    kept = [event for event in events if event["generation"] != 2 or event["event"] == "run.finished"]
    run.event_log.write_text("".join(json.dumps(event) + "\n" for event in kept))
    report = audit(run)
    assert "generation 2 is in the sample logs only" in report.unknown
    assert (report.verdict, report.invalid) == ("unknown", [])


def test_a_generation_killed_before_it_logged_its_resumption_is_not_invalid(tmp_path: Path) -> None:
    """A generation that died between `run.started` and `run.resumed` is no reason to call the run invalid."""
    run = LoggedRun(tmp_path, (Generation(2, 0, 4), Generation(2, 3, 3), Generation(2, 3, 6)))
    events = run.event_log.read_text().splitlines()
    resumed = [line for line in events if '"run.resumed"' in line and '"generation": 1' in line]
    assert len(resumed) == 1
    run.event_log.write_text("".join(line + "\n" for line in events if line not in resumed))
    assert not audit(run).invalid


def test_a_torn_line_spoils_none_of_the_next_generations(tmp_path: Path) -> None:
    """What is appended after a half-written line stands on lines of its own, each of them readable."""
    run = LoggedRun(tmp_path, [Generation(1, 0, 4)], is_finished=False)
    num_whole = len(run.lines(0)) - 1
    run.tear(1, Generation(1, 3, 6))
    lines = run.path(0).read_text().splitlines()
    with pytest.raises(json.JSONDecodeError):
        json.loads(lines.pop(num_whole))
    entries = [json.loads(line) for line in lines]
    assert [entry["step"] for entry in entries if entry["generation"] == 1] == [3, 3, 3, 4, 4, 4, 5, 5, 5]
    assert len([entry for entry in entries if entry["generation"] == 0]) == num_whole


def test_a_torn_line_of_a_step_that_was_made_again_is_valid(tmp_path: Path) -> None:
    """Where every committed step has all its samples, a torn line between them does not change the verdict."""
    run = LoggedRun(tmp_path, [Generation(1, 0, 4)], is_finished=False)
    run.tear(1, Generation(1, 3, 6))
    run.log("run.finished", generation=1, step=6)
    assert audit(run).verdict == "valid"


def test_other_runs_in_the_same_files_are_left_out(tmp_path: Path) -> None:
    """Of two runs in the same files the last one is judged, and the other one where it is named."""
    run = LoggedRun(tmp_path, [Generation(1, 0, 4)], is_finished=False)
    run.run_id = "ba9876543210"
    run.add(0, Generation(2, 0, 6))
    run.log("run.finished", generation=0, step=6)
    last = audit_files(run.directory)
    assert (last.run_id, last.report.verdict) == ("ba9876543210", "valid")
    named = audit_files(run.directory, event_log=run.event_log, run_id=RUN_ID)
    assert (named.run_id, named.report.verdict) == (RUN_ID, "unknown")

"""Judges from logs alone whether each sample of each epoch was used exactly once.

Reads the ranks' sample logs and the event log; nothing that the trainer keeps for itself. Not every computed step
counts: a generation resumes from a snapshot and repeats the steps after it. A step is *committed* by the last
generation that began at or before it.

Verdicts: `valid`; `invalid` with the evidence; `unknown` where evidence is missing: a rank's sample log is absent or
unreadable, or the run has not ended.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from elastic_mnist.errors import UsageError

_MAX_SHOWN: Final = 5

Entry = dict[str, Any]
"""One line of a log: a JSON object."""


@dataclass(kw_only=True)
class Report:
    """The verdict and its evidence.

    Attributes:
        invalid, unknown: findings, a text each.
        num_epochs: of those, the whole ones.
        num_steps: committed steps.
        num_samples: in committed steps.
        replayed: steps that were computed and did not count, by generation.
        skipped: committed steps without a finite gradient; their samples were read and left no trace in the weights.
    """

    invalid: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    num_epochs: int = 0
    num_steps: int = 0
    num_samples: int = 0
    replayed: dict[int, int] = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """`valid`, `invalid` or `unknown`."""
        return "invalid" if self.invalid else "unknown" if self.unknown else "valid"


@dataclass(frozen=True, kw_only=True)
class AuditedRun:
    """A run whose logs were found in files, and its report."""

    run_id: str
    event_log: Path
    report: Report


def audit_files(directory: Path, *, event_log: Path | None = None, run_id: str | None = None) -> AuditedRun:
    """Judge one run by the files of its logs.

    Args:
        directory: of the sample logs.
        event_log: the job's; None for the one near `directory` that names the run.
        run_id: None for the run that wrote last.

    Raises:
        UsageError: there are no sample logs, or no event log names the run.
    """
    everything, unreadable = _read_sample_logs(directory)
    run_id = run_id or _last_run(directory, everything)
    entries = [entry for entry in everything if entry.get("run_id") == run_id]
    event_log, events = _find_event_log(directory, event_log, run_id)
    report = audit([event for event in events if event.get("run_id") == run_id], entries, unreadable)
    return AuditedRun(run_id=run_id, event_log=event_log, report=report)


def audit(events: list[Entry], entries: Iterable[Entry], unreadable: Sequence[str] = ()) -> Report:
    """Judge one run.

    Args:
        events: the run's events.
        entries: the lines of its sample logs.
        unreadable: where lines could not be read, a text each; they may hold what is missing.
    """
    report = Report()
    starts = {event["generation"]: event for event in events if event["event"] == "run.started"}
    ends = [event["step"] for event in events if event["event"] == "run.finished"]
    if not starts or not ends:
        report.unknown.append(f"the event log does not tell of the run's {'end' if starts else 'start'}")
        return report
    any_start = next(iter(starts.values()))
    shape = _Shape(
        num_samples=any_start["num_train_samples"],
        global_batch_size=any_start["global_batch_size"],
        micro_batch_size=any_start["micro_batch_size"],
    )
    computed: dict[tuple[int, int], list[Entry]] = defaultdict(list)  # by step and generation
    logging_ranks: dict[int, set[int]] = defaultdict(set)  # by generation
    unlogged_from: dict[int, int] = {}  # first step of each generation that the event log lacks
    for entry in entries:
        number, step = entry["generation"], entry["step"]
        computed[step, number].append(entry)
        logging_ranks[number].add(entry["rank"])
        if number not in starts:
            unlogged_from[number] = min(step, unlogged_from.get(number, step))
    report.unknown += [f"generation {number} is in the sample logs only" for number in sorted(unlogged_from)]

    first = min(start["step"] for start in starts.values())
    skipped = {(event["step"], event["generation"]) for event in events if event["event"] == "step.skipped"}
    used: dict[int, Counter[int]] = defaultdict(Counter)  # samples by epoch
    for step in range(first, ends[-1]):
        owner = max(number for number, start in starts.items() if start["step"] <= step)
        found = computed.pop((step, owner), [])
        silent = sorted(set(range(starts[owner]["world_size"])) - logging_ranks[owner])
        excuses = [f"the sample log of rank {rank} is missing" for rank in silent] + list(unreadable)
        excuses += [f"generation {number} may have made it" for number, since in unlogged_from.items() if step >= since]
        where = f"step {step} (generation {owner})"
        _judge_step(report, shape, where=where, step=step, found=found, excuses=excuses)
        if (step, owner) in skipped:
            report.skipped.append(step)
        for entry in found:
            used[entry["epoch"]].update(entry["indices"])
    report.num_steps = ends[-1] - first
    report.num_samples = sum(counter.total() for counter in used.values())
    report.replayed = dict(Counter(generation for _, generation in computed))  # what is left did not count
    for epoch in range(first // shape.steps_per_epoch, -(-ends[-1] // shape.steps_per_epoch)):
        # A run that resumed from a file in mid-epoch has made only the rest of it.
        is_whole = first <= epoch * shape.steps_per_epoch and (epoch + 1) * shape.steps_per_epoch <= ends[-1]
        report.num_epochs += is_whole
        _judge_epoch(report, shape, epoch, used[epoch], is_whole=is_whole)
    return report


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """The sizes that the event log gives."""

    num_samples: int
    global_batch_size: int
    micro_batch_size: int

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_samples // self.global_batch_size)

    def num_micro_batches(self, step: int) -> int:
        start = step % self.steps_per_epoch * self.global_batch_size
        return -(-min(self.global_batch_size, self.num_samples - start) // self.micro_batch_size)


def _judge_step(
    report: Report,
    shape: _Shape,
    *,
    where: str,
    step: int,
    found: list[Entry],
    excuses: Sequence[str],
) -> None:
    """Check that a committed step has each micro-batch once, and of the right epoch.

    `excuses` say why a missing micro-batch may have been computed all the same.
    """
    counts = Counter(entry["micro_batch"] for entry in found)
    for index, count in sorted(counts.items()):
        if count > 1:
            ranks = sorted(entry["rank"] for entry in found if entry["micro_batch"] == index)
            report.invalid.append(f"{where}: micro-batch {index} was computed {count} times, by ranks {ranks}")
    epoch = step // shape.steps_per_epoch
    if any(entry["epoch"] != epoch for entry in found):
        report.invalid.append(f"{where}: is of epoch {epoch}, the sample log says another")
    missing = sorted(set(range(shape.num_micro_batches(step))) - set(counts))
    if missing and excuses:
        report.unknown.append(f"{where}: micro-batches {missing} are missing; {'; '.join(excuses)}")
    elif missing:
        report.invalid.append(f"{where}: micro-batches {missing} are missing")


def _judge_epoch(report: Report, shape: _Shape, epoch: int, used: Counter[int], *, is_whole: bool) -> None:
    """Check that a whole epoch used each sample once, and a partial one none twice."""
    everything = set(range(shape.num_samples))
    findings = {
        "not used": everything - set(used) if is_whole else set(),
        "used more than once": {sample for sample, count in used.items() if count > 1},
        "not in the set": set(used) - everything,
    }
    for kind, samples in findings.items():
        if samples:
            shown = ", ".join(map(str, sorted(samples)[:_MAX_SHOWN])) + (", ..." if len(samples) > _MAX_SHOWN else "")
            finding = f"epoch {epoch}: {len(samples)} samples {kind}: {shown}"
            (report.unknown if kind == "not used" and report.unknown else report.invalid).append(finding)


def _find_event_log(directory: Path, named: Path | None, run_id: str) -> tuple[Path, list[Entry]]:
    """Return the event log that names the run, and its events; looks near the sample logs unless one is named."""
    parent = directory.absolute().parent
    near = [directory / "events.jsonl", *sorted(parent.glob("*.jsonl")), *sorted(parent.glob("*/*.jsonl"))]
    places = [named] if named else near
    for place in places:
        if not named and not place.is_file():
            continue
        events = _read_events(place)
        if any(event.get("run_id") == run_id for event in events):
            return place, events
    looked = f"--event_log {named}: does not" if named else f"{directory}: no event log beside it does"
    raise UsageError(f"{looked} tell of run {run_id}; name another with --event_log or --run_id")


def _read_events(path: Path) -> list[Entry]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text"
        raise UsageError(f"--event_log {path}: {reason}; name the job's event log") from None
    return [event for event in map(_parse, lines) if event is not None and "event" in event]


def _last_run(directory: Path, entries: list[Entry]) -> str:
    """Return the run that wrote the last line of the newest sample log."""
    for path in sorted(directory.glob("rank-*.jsonl"), key=lambda path: path.stat().st_mtime, reverse=True):
        for line in reversed(path.read_text(errors="replace").splitlines()):
            entry = _parse(line)
            if entry is not None and "run_id" in entry:
                return str(entry["run_id"])
    raise UsageError(f"{directory}: none of its {len(entries)} lines names a run; name one with --run_id")


def _read_sample_logs(directory: Path) -> tuple[list[Entry], list[str]]:
    """Return the lines of all ranks, and where lines could not be read."""
    paths = sorted(directory.glob("rank-*.jsonl")) if directory.is_dir() else []
    if not paths:
        raise UsageError(f"{directory}: no sample logs there; name the directory that --sample_log named")
    entries, unreadable = [], []
    for path in paths:
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
            entry = _parse(line)
            if entry is None or not {"generation", "rank", "epoch", "step", "micro_batch", "indices"} <= set(entry):
                unreadable.append(f"{path.name} line {number} is not readable")
            else:
                entries.append(entry)
    return entries, unreadable


def _parse(line: str) -> Entry | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None

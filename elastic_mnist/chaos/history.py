"""What a job has left behind, as the checkers see it: read from logs and files after its end, and nothing else."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from elastic_mnist.chaos.injector import NOTES
from elastic_mnist.chaos.plan import KINDS, Fault
from elastic_mnist.errors import SnapshotError, UsageError
from elastic_mnist.telemetry.audit import audit_files

_MAX_FINDINGS: Final = 5

Facts = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The promise, as far as it hangs on the options.

    Attributes:
        memory_every: steps between the states that the memory tier keeps; 0 for none.
        hang_timeout: seconds after which a worker without progress counts as hung.
        patience: a factor of all bounds of time, for a machine that is slow or has other work.
        job_seconds: within which the disturbed job must end.
    """

    memory_every: int = 1
    hang_timeout: float = 10.0
    patience: float = 1.0
    job_seconds: float = 600.0

    def detect_seconds(self, fault: Fault) -> float:
        """Return within which time a fault must be noticed."""
        kind = KINDS[fault.kind]
        return self.patience * kind.detect_seconds + (self.hang_timeout if kind.waits_for_hang else 0.0)

    def recover_seconds(self, fault: Fault) -> float:
        """Return within which time the job must be again where it was."""
        return self.detect_seconds(fault) + self.patience * KINDS[fault.kind].recover_seconds


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one job has left behind.

    Attributes:
        events: of its event log; `time` is added, in seconds since the epoch of UTC.
        unreadable: the lines of the log that are no event.
        notes: of the injector.
        marks: of the faults that fired.
        snapshots: verdict, step and digest of the weights of each durable snapshot, the newest first; None where they
            cannot be read.
    """

    events: tuple[Facts, ...] = ()
    unreadable: tuple[str, ...] = ()
    notes: tuple[Facts, ...] = ()
    marks: tuple[Facts, ...] = ()
    snapshots: tuple[Facts, ...] | None = None

    def told(self, *names: str) -> list[Facts]:
        """Return the events of some names."""
        return [event for event in self.events if event["event"] in names]

    def noted(self, note: str) -> list[Facts]:
        """Return the notes of a name."""
        return [facts for facts in self.notes if facts["note"] == note]

    @property
    def finished(self) -> Facts | None:
        """The event that tells of the job's end."""
        return next(reversed(self.told("run.finished")), None)

    def blackouts(self) -> list[float]:
        """Return the times at which the last living agent ended, and with it the memory tier."""
        alive: set[int] = set()
        times = []
        for note in self.notes:
            if note["note"] == "agent.started":
                alive.add(note["node"])
            elif note["note"] == "agent.ended":
                alive.discard(note["node"])
                times += [] if alive else [note["time"]]
        return times

    def newest_durable(self, before: float) -> int:
        """Return the step of the newest snapshot that was saved before a time and not damaged since; 0 for none."""
        damaged = {(note["path"], note["step"]): note["time"] for note in self.noted("snapshot.damaged")}
        whole = [
            event["step"]
            for event in self.told("snapshot.saved")
            if event["time"] < before and not event["time"] < damaged.get((event["path"], event["step"]), 0.0) < before
        ]
        return max(whole, default=0)


@dataclass(frozen=True, kw_only=True)
class History:
    """All that is judged.

    Attributes:
        faults: the plan.
        terms: the promise.
        calm: the undisturbed job.
        disturbed: the other one.
        difference: the first difference of the two final snapshots, for people; empty for none, None: not known.
        audit: the verdict of `elastic-mnist audit` on the disturbed job, and what it said.
    """

    faults: tuple[Fault, ...]
    terms: Terms
    calm: Job
    disturbed: Job
    difference: str | None = None
    audit: tuple[str, str] = ("unknown", "not asked")


def read(calm: Path, disturbed: Path, faults: tuple[Fault, ...], terms: Terms) -> History:
    """Read what two jobs have left in their directories."""
    return History(
        faults=faults,
        terms=terms,
        calm=read_job(calm),
        disturbed=read_job(disturbed),
        difference=_difference(calm / "snapshots", disturbed / "snapshots"),
        audit=_audit(disturbed),
    )


def read_job(directory: Path) -> Job:
    """Read what a job has left in its directory; what is missing is empty."""
    lines = list(_lines(directory / "snapshots" / "events.jsonl"))
    events = [_event(line) for line in lines]
    marks = [content for path in (directory / "marks").glob("*.json") for content in map(json.loads, _lines(path))]
    return Job(
        events=tuple(event for event in events if event is not None),
        unreadable=tuple(line for line, event in zip(lines, events, strict=True) if event is None),
        notes=read_notes(directory),
        marks=tuple(sorted(marks, key=lambda mark: mark["time"])),
        snapshots=_snapshots(directory / "snapshots"),
    )


def read_notes(directory: Path) -> tuple[Facts, ...]:
    """Read what the injector has noted of the job in a directory."""
    return tuple(map(json.loads, _lines(directory / NOTES)))


def _lines(path: Path) -> Iterable[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return ()


_NEEDED: Final = {"timestamp", "level", "event", "run_id", "generation", "rank", "world_size"}


def _event(line: str) -> Facts | None:
    try:
        content = json.loads(line)
        if not set(content) >= _NEEDED:
            return None
        return {**content, "time": datetime.fromisoformat(content["timestamp"].replace("Z", "+00:00")).timestamp()}
    except (ValueError, TypeError, AttributeError):
        return None


def _snapshots(directory: Path) -> tuple[Facts, ...] | None:
    """Read all snapshots, and hold each against its manifest."""
    from elastic_mnist.snapshots.listing import look  # noqa: PLC0415 - torch is not needed before

    with _silent():
        try:
            entries = look(str(directory), verify=True).entries
        except UsageError:
            return None
    return tuple(
        {"verdict": entry.verdict, "step": entry.step, "path": entry.path, "weights_sha256": entry.weights_sha256}
        for entry in entries
    )


def _difference(calm: Path, disturbed: Path) -> str | None:
    """Compare the newest snapshots of two places, bit by bit."""
    from elastic_mnist.snapshots.comparison import compare  # noqa: PLC0415 - the same
    from elastic_mnist.snapshots.lookup import find  # noqa: PLC0415

    with _silent():
        try:
            ours, theirs = (find(str(place), named="snapshot").state for place in (disturbed, calm))
        except (UsageError, SnapshotError):
            return None
    found = compare(ours, theirs)
    if found is None:
        return ""
    return f"{found.num_keys} keys differ, first {found.location}: {found.ours} and undisturbed {found.theirs}"


def _audit(directory: Path) -> tuple[str, str]:
    try:
        report = audit_files(directory / "ledger", event_log=directory / "snapshots" / "events.jsonl").report
    except UsageError as error:
        return "unknown", str(error)
    counts = (f"{report.num_steps} committed steps with {report.num_samples} samples", f"{report.num_epochs} epochs")
    return report.verdict, "; ".join([*report.invalid, *report.unknown][:_MAX_FINDINGS] or counts)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep to themselves what the readers of snapshots would log."""
    import structlog  # noqa: PLC0415 - the same

    with structlog.testing.capture_logs():
        yield

"""Verdicts on a history: pure functions, each on one promise.

`valid` needs evidence, as `invalid` does; what is missing makes `unknown`. A fault is judged by `judge_fault`, the job
as a whole by each of `CHECKERS`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from elastic_mnist.chaos.history import Facts, History, Job
from elastic_mnist.chaos.plan import KINDS, Fault

VALID: Final = "valid"
INVALID: Final = "invalid"
UNKNOWN: Final = "unknown"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The verdict on one promise, and the evidence."""

    name: str
    verdict: str
    evidence: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a fault.

    Attributes:
        step: at which it fired; None where it did not.
        detected_seconds: after it fired, when the log first tells of it.
        recovered_seconds: after it fired, when the job was again where it had been.
        num_lost_steps: steps that had to be made again.
        verdict, reason: what is to be thought of it.
    """

    fault: Fault
    step: int | None = None
    detected_seconds: float | None = None
    recovered_seconds: float | None = None
    num_lost_steps: int | None = None
    verdict: str
    reason: str


def overall(verdicts: Iterable[str]) -> str:
    """Return the verdict on all: `invalid` where one is, else `unknown` where one is, else `valid`."""
    found = set(verdicts)
    return INVALID if INVALID in found else UNKNOWN if UNKNOWN in found or not found else VALID


# A fault


def judge_fault(history: History, index: int) -> Outcome:
    """Judge whether a fault fired, and whether the job noticed and recovered as promised."""
    fault, job = history.faults[index], history.disturbed
    marks = [mark for mark in job.marks if mark["fault"] == index]
    missing = sorted(set(fault.ranks) - {mark["rank"] for mark in marks})
    if missing:
        return Outcome(fault=fault, verdict=UNKNOWN, reason=f"did not fire at rank {', '.join(map(str, missing))}")
    fired = max(marks, key=lambda mark: mark["time"])
    if fault.kind == "damage" and not _damage_of(job, fired):
        return Outcome(fault=fault, step=fired["step"], verdict=UNKNOWN, reason="there was no snapshot to be damaged")
    after = _window(history, fired)
    if fault.kind == "grow" and any(_is_end_of(fired, facts) for facts in after):
        return Outcome(fault=fault, step=fired["step"], verdict=UNKNOWN, reason="the job finished before the node came")
    detected = min((facts["time"] for facts in after if _tells(fault, fired, facts)), default=None)
    recovered = min((facts["time"] for facts in after if _is_back(fault, fired, facts)), default=None)
    lost, promised = _lost(history, fault, fired, after)
    detected_seconds = None if detected is None else detected - fired["time"]
    recovered_seconds = None if recovered is None else recovered - fired["time"]
    complaints = [
        *_late("noticed", detected_seconds, history.terms.detect_seconds(fault)),
        *_late("back at its step", recovered_seconds, history.terms.recover_seconds(fault)),
        *([f"{lost} steps lost, promised are at most {promised}"] if lost is not None and lost > promised else []),
        *_complaints_of_kind(history, index, fired, after),
    ]
    return Outcome(
        fault=fault,
        step=fired["step"],
        detected_seconds=detected_seconds,
        recovered_seconds=recovered_seconds,
        num_lost_steps=lost,
        verdict=INVALID if complaints else VALID,
        reason="; ".join(complaints) or f"at most {promised} steps lost were allowed",
    )


def _late(what: str, seconds: float | None, bound: float) -> list[str]:
    if seconds is None:
        return [f"was not {what}"]
    return [f"{what} after {seconds:.1f} s, promised are {bound:.0f}"] if seconds > bound else []


def _window(history: History, fired: Facts) -> list[Facts]:
    """Return what was told and noted after a fault, up to and with the mark of the next one."""
    job = history.disturbed
    later = [
        mark
        for mark in job.marks
        if mark["fault"] > fired["fault"] and not KINDS[history.faults[mark["fault"]].kind].is_of_data
    ]
    end = min(later, key=lambda mark: mark["time"], default=None)
    everything: list[Facts] = [*job.events, *job.notes, *([end] if end else [])]
    limit = end["time"] if end else float("inf")
    return sorted(
        (facts for facts in everything if fired["time"] <= facts["time"] <= limit), key=lambda facts: facts["time"]
    )


def _tells(fault: Fault, fired: Facts, facts: Facts) -> bool:
    """Whether something tells that a fault was noticed."""
    if KINDS[fault.kind].is_of_data:
        return facts.get("event") == "step.skipped" and facts.get("step") == fired["step"]
    if facts.get("event") == "step.skipped":
        return False
    is_told = facts.get("level") in {"warning", "error"} or facts.get("event") == "run.stopped"
    return is_told or facts.get("note") == "agent.ended" or _is_new_start(fired, facts)


def _is_new_start(fired: Facts, facts: Facts) -> bool:
    return facts.get("event") == "run.started" and facts["generation"] > fired["generation"]


def _is_end_of(fired: Facts, facts: Facts) -> bool:
    """Whether something tells that the fault's own generation finished the job."""
    return facts.get("event") == "run.finished" and bool(facts["generation"] == fired["generation"])


def _is_back(fault: Fault, fired: Facts, facts: Facts) -> bool:
    """Whether something shows a generation after the fault's at or beyond its step."""
    step, generation = facts.get("step"), facts.get("generation")
    if step is None or generation is None or "note" in facts:
        return False
    if KINDS[fault.kind].is_of_data:
        return bool(step > fired["step"])
    return bool(generation > fired["generation"] and step >= fired["step"])


def _lost(history: History, fault: Fault, fired: Facts, after: Sequence[Facts]) -> tuple[int | None, int]:
    """Return how many steps a fault has cost, None where that is not known, and how many it may cost."""
    every = history.terms.memory_every
    durable = max(0, fired["step"] - history.disturbed.newest_durable(_end_of_generation(fired, after)))
    promised = durable if KINDS[fault.kind].is_end_of_agent or not every else every
    if KINDS[fault.kind].is_of_data:
        return 0, promised
    start = next((facts for facts in after if _is_new_start(fired, facts)), None)
    return (None if start is None else max(0, fired["step"] - start["step"])), promised


def _end_of_generation(fired: Facts, after: Sequence[Facts]) -> float:
    """Return when the next generation began; until then, the fault's own may still have saved."""
    return float(next((facts["time"] for facts in after if _is_new_start(fired, facts)), fired["time"]))


def _damage_of(job: Job, fired: Facts) -> Facts | None:
    return next((note for note in job.noted("snapshot.damaged") if note["time"] >= fired["time"]), None)


def _complaints_of_kind(history: History, index: int, fired: Facts, after: Sequence[Facts]) -> list[str]:
    """Return what is amiss in what only this kind of fault should have brought about."""
    fault = history.faults[index]
    sizes = [facts["world_size"] for facts in after if _is_new_start(fired, facts)]
    if KINDS[fault.kind].is_stop and not any(facts.get("event") == "run.stopped" for facts in after):
        saved = history.disturbed.newest_durable(_end_of_generation(fired, after))
        if saved < fired["step"]:  # else it was stopped before it had anything to save
            return [f"was not stopped in order: the newest snapshot is that of step {saved}"]
    ends = [note for note in history.disturbed.noted("agent.ended") if note.get("fault") == index]
    if KINDS[fault.kind].is_end_of_agent and not ends:
        return [f"the agent did not end with status {KINDS[fault.kind].agent_status}"]
    if fault.kind in {"grow", "shrink"} and sizes:
        # Not the next generation has to have it: a node on a busy machine may be late for one.
        end = max(sizes) if fault.kind == "grow" else min(sizes)
        if not (end > fired["world_size"] if fault.kind == "grow" else end < fired["world_size"]):
            return [f"{fired['world_size']} workers became {', '.join(map(str, sizes))}"]
    if fault.kind == "damage":
        damage = _damage_of(history.disturbed, fired)
        rejected = {facts.get("path") for facts in after if facts.get("event") == "snapshot.rejected"}
        if damage is not None and damage["path"] not in rejected:
            return [f"the damaged {damage['path']} was not rejected"]
    return []


# The job


def check_end(history: History) -> Finding:
    """When the faults are over, the job finishes, in time."""
    job, bound = history.disturbed, history.terms.job_seconds
    starts, ends = job.noted("agent.started"), job.noted("job.ended")
    overdue = job.noted("job.overdue")
    if overdue:
        return _finding("end", INVALID, overdue[0]["reason"])
    if not starts or not ends:
        return _finding("end", UNKNOWN, "the injector has not noted the job's start and end")
    failed = [note["status"] for note in job.noted("agent.ended") if not _is_explained(history, note)]
    if failed:
        return _finding("end", INVALID, f"agents ended with status {failed}, which no fault explains")
    if job.finished is None:
        return _finding("end", INVALID, "the log does not tell of the job's end")
    seconds = ends[-1]["time"] - starts[0]["time"]
    verdict = VALID if seconds <= bound else INVALID
    return _finding("end", verdict, f"finished after {seconds:.1f} s, at most {bound:.0f} s are allowed")


def _is_explained(history: History, note: Facts) -> bool:
    """Whether an agent ended in success, or as the fault at that time has agents end."""
    index = note.get("fault")
    expected = 0 if index is None else KINDS[history.faults[index].kind].agent_status
    return bool(note["status"] == expected)


def check_weights(history: History) -> Finding:
    """The final weights, and the optimizer's state, are those of the undisturbed job, bit for bit."""
    finals = [_final(job) for job in (history.calm, history.disturbed)]
    told = [job.finished.get("weights_sha256") if job.finished else None for job in (history.calm, history.disturbed)]
    if None in finals or None in told:
        return _finding("weights", UNKNOWN, "a job has told of no final weights, or left no whole final snapshot")
    if finals[0] != finals[1] or finals != told:
        shown = ", ".join(f"{digest:.12}" for digest in (*finals, *told))
        return _finding("weights", INVALID, f"undisturbed, disturbed in the files and then in the logs: {shown}")
    if history.difference is None:
        return _finding("weights", UNKNOWN, "the final snapshots cannot be compared")
    if history.difference:
        return _finding("weights", INVALID, history.difference)
    return _finding("weights", VALID, f"{finals[0]}, and the same optimizer")


def _final(job: Job) -> str | None:
    """Return the digest of the weights in the final snapshot."""
    whole = [entry for entry in job.snapshots or () if entry["verdict"] == "whole"]
    if not whole or job.finished is None or whole[0]["step"] != job.finished["step"]:
        return None
    return str(whole[0]["weights_sha256"])


def check_steps(history: History) -> Finding:
    """The job has as many steps as the undisturbed one."""
    if history.calm.finished is None or history.disturbed.finished is None:
        return _finding("steps", UNKNOWN, "a job has not told of its end")
    expected, found = history.calm.finished["step"], history.disturbed.finished["step"]
    return _finding("steps", VALID if expected == found else INVALID, f"{found} steps, undisturbed {expected}")


_OF_AN_EPOCH: Final = ("step", "train_loss", "test_loss", "test_accuracy", "num_test_samples")


def check_epochs(history: History) -> Finding:
    """Each epoch is told with the losses and the accuracy of the undisturbed job, to the last digit."""
    expected = {event["epoch"]: event for event in history.calm.told("epoch.finished")}
    found = history.disturbed.told("epoch.finished")
    if not expected or history.disturbed.finished is None:
        return _finding("epochs", UNKNOWN, "a job has told of no epoch, or not of its end")
    wrong = [
        f"epoch {event['epoch']}: {key} {event.get(key)}, undisturbed {expected.get(event['epoch'], {}).get(key)}"
        for event in found
        for key in _OF_AN_EPOCH
        if event.get(key) != expected.get(event["epoch"], {}).get(key)
    ]
    wrong += [f"epoch {epoch} is not told" for epoch in sorted({*expected} - {event["epoch"] for event in found})]
    return _finding("epochs", INVALID if wrong else VALID, wrong[0] if wrong else f"{len(expected)} told alike")


def check_samples(history: History) -> Finding:
    """Each sample of each epoch was used exactly once, by the ledgers."""
    verdict, evidence = history.audit
    return _finding("samples", verdict, evidence)


def check_snapshots(history: History) -> Finding:
    """Every snapshot that was left is whole, and what was set aside is what was damaged on purpose."""
    job = history.disturbed
    if not job.snapshots:
        return _finding("snapshots", UNKNOWN, "there are none, or they cannot be read")
    counts = Counter(entry["verdict"] for entry in job.snapshots)
    num_damaged = len(job.noted("snapshot.damaged"))
    bad = [entry for entry in job.snapshots if entry["verdict"] not in {"whole", "set aside"}]
    if bad:
        return _finding("snapshots", INVALID, f"{bad[0]['path']} is {bad[0]['verdict']}")
    if counts["set aside"] > num_damaged:
        return _finding("snapshots", INVALID, f"{counts['set aside']} set aside, {num_damaged} were damaged on purpose")
    return _finding("snapshots", VALID, f"{counts['whole']} whole, {counts['set aside']} damaged and set aside")


def check_position(history: History) -> Finding:
    """No generation goes back further than promised, whatever it was that ended the one before."""
    job, every = history.disturbed, history.terms.memory_every
    starts = [event for event in job.told("run.started") if event["rank"] == 0]
    if not starts:
        return _finding("position", UNKNOWN, "the log tells of no start")
    reached = [facts for facts in (*job.events, *job.marks) if facts.get("step") is not None]
    for before, start in pairwise(starts):
        floor = job.newest_durable(start["time"])
        is_memory_kept = not any(before["time"] < time < start["time"] for time in job.blackouts())
        if every and is_memory_kept:
            steps = [facts["step"] for facts in reached if facts["generation"] == before["generation"]]
            floor = max(floor, max(steps, default=0) - every)
        if start["step"] < floor:
            return _finding(
                "position",
                INVALID,
                f"generation {start['generation']} began at step {start['step']}, promised is {floor} or later",
            )
    return _finding("position", VALID, f"{len(starts)} generations, none went back further than promised")


def check_log(history: History) -> Finding:
    """The log is one stream: one run, each generation begun once and after the one before, told by rank 0 alone."""
    job = history.disturbed
    if not job.events:
        return _finding("log", UNKNOWN, "there is no event log")
    informed = [event for event in job.events if event["level"] == "info"]
    generations = [event["generation"] for event in informed if event["generation"] is not None]
    starts = Counter(event["generation"] for event in job.told("run.started"))
    complaints = [
        *(f"no event: {line[:60]!r}" for line in job.unreadable),
        *(f"{event['event']} told by rank {event['rank']}" for event in informed if event["rank"] != 0),
        *(f"generation {b} told after {a}" for a, b in pairwise(generations) if b < a),
        *(f"generation {number} began {count} times" for number, count in starts.items() if count > 1),
        *_unless_one("run", len({event["run_id"] for event in job.told("run.started")})),
        *_unless_one("end", len(job.told("run.finished"))),
    ]
    verdict = INVALID if complaints else VALID
    return _finding("log", verdict, complaints[0] if complaints else f"{len(job.events)} events, one stream")


def _unless_one(what: str, number: int) -> list[str]:
    return [] if number == 1 else [f"the log tells of {number} {what}s"]


def check_leftovers(history: History) -> Finding:
    """Soon after the job's end there is no process, no temporary file and no shared memory of it."""
    notes = history.disturbed.noted("leftovers")
    if not notes:
        return _finding("leftovers", UNKNOWN, "nobody looked")
    left = {kind: notes[-1][kind] for kind in ("processes", "shared_memory", "temporary_files") if notes[-1][kind]}
    shown = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in left.items())
    return _finding("leftovers", INVALID if left else VALID, shown or "no process, no temporary file, no shared memory")


CHECKERS: Final[tuple[Callable[[History], Finding], ...]] = (
    check_end,
    check_weights,
    check_steps,
    check_epochs,
    check_samples,
    check_snapshots,
    check_position,
    check_log,
    check_leftovers,
)


def _finding(name: str, verdict: str, evidence: str) -> Finding:
    return Finding(name=name, verdict=verdict, evidence=evidence)

"""The checkers of `elastic-mnist chaos`: each says valid of a job that went well, and sees what was planted in it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from elastic_mnist.chaos.checkers import CHECKERS, Outcome, judge_fault, overall
from elastic_mnist.chaos.history import History, Job, Terms
from elastic_mnist.chaos.plan import Fault

SHA256 = "3d" * 32
OTHER_SHA256 = "0f" * 32
NUM_STEPS = 32

Facts = dict[str, Any]
Spoil = Callable[["Story"], object]


@dataclasses.dataclass
class Story:
    """A job that a fault befell at step 15, second 5, and that recovered; to be spoilt."""

    fault: Fault
    terms: Terms = dataclasses.field(default_factory=Terms)
    events: list[Facts] = dataclasses.field(default_factory=list)
    notes: list[Facts] = dataclasses.field(default_factory=list)
    marks: list[Facts] = dataclasses.field(default_factory=list)
    snapshots: list[Facts] | None = dataclasses.field(default_factory=list)
    unreadable: list[str] = dataclasses.field(default_factory=list)
    calm_events: list[Facts] = dataclasses.field(default_factory=list)
    calm_snapshots: list[Facts] = dataclasses.field(default_factory=list)
    difference: str | None = ""
    audit: tuple[str, str] = ("valid", "32 committed steps")

    def tell(self, event: str, time: float, **facts: object) -> None:
        """Add an event of rank 0, of the generation that the time says."""
        generation = int(time >= 8)
        head: Facts = {"run_id": "ab", "generation": generation, "rank": 0, "world_size": 2, "level": "info"}
        self.events.append({"event": event, "time": time, **head, **facts})

    def note(self, note: str, time: float, **facts: object) -> None:
        """Add a note of the injector."""
        self.notes.append({"note": note, "time": time, **facts})

    def event(self, name: str, generation: int | None = None) -> Facts:
        """Return the event of a name, of a generation if one is given."""
        return next(e for e in self.events if e["event"] == name and generation in (None, e["generation"]))

    def drop(self, name: str) -> None:
        """Leave all events and notes of a name out."""
        self.events = [event for event in self.events if event["event"] != name]
        self.notes = [note for note in self.notes if note["note"] != name]

    def postpone_second_generation(self, seconds: float) -> None:
        """Let all that follows the fault come later."""
        for facts in (*self.events, *self.notes):
            facts["time"] += seconds if facts["time"] >= 8 else 0

    def history(self) -> History:
        """Return the story as the checkers see it."""
        return History(
            faults=(self.fault,),
            terms=self.terms,
            calm=Job(events=tuple(self.calm_events), snapshots=tuple(self.calm_snapshots)),
            disturbed=Job(
                events=tuple(sorted(self.events, key=lambda event: float(event["time"]))),
                unreadable=tuple(self.unreadable),
                notes=tuple(sorted(self.notes, key=lambda note: float(note["time"]))),
                marks=tuple(self.marks),
                snapshots=None if self.snapshots is None else tuple(self.snapshots),
            ),
            difference=self.difference,
            audit=self.audit,
        )

    def outcome(self) -> Outcome:
        """Return the verdict on the fault."""
        return judge_fault(self.history(), 0)


def story(kind: str = "kill", *, resumed_at: int = 15) -> Story:
    """Return a job that went well; its second generation began at step `resumed_at`, at second 8."""
    told = Story(fault=Fault(kind=kind, step=15, ranks=(1,)))
    told.marks.append({"fault": 0, "rank": 1, "step": 15, "generation": 0, "world_size": 2, "time": 5.0})
    told.note("agent.started", 0.0, node=0)
    told.tell("run.started", 2.0, step=0)
    told.tell("snapshot.saved", 4.0, step=10, path="step-00000010.pt")
    told.tell("peer.lost", 5.5, level="warning", rank=0)
    told.tell("run.started", 8.0, step=resumed_at)
    told.tell("train.progress", 9.0, step=17)
    for epoch, time in ((1, 9.1), (2, 19.0)):
        told.tell("epoch.finished", time, epoch=epoch, step=16 * epoch, train_loss=0.5 / epoch, test_accuracy=0.9)
    told.tell("snapshot.saved", 19.1, step=NUM_STEPS, path="step-00000032.pt")
    told.tell("run.finished", 19.2, step=NUM_STEPS, weights_sha256=SHA256)
    told.note("agent.ended", 20.0, node=0, status=0, fault=None)
    told.note("job.ended", 20.1)
    told.note("leftovers", 20.2, processes=[], shared_memory=[], temporary_files=[])
    final = {"verdict": "whole", "step": NUM_STEPS, "path": "step-00000032.pt", "weights_sha256": SHA256}
    told.snapshots = [final, {"verdict": "whole", "step": 10, "path": "step-00000010.pt", "weights_sha256": "77"}]
    told.calm_snapshots = [dict(final)]
    told.calm_events = [dict(event) for event in told.events if event["event"] in {"epoch.finished", "run.finished"}]
    return told


def stopped(kind: str = "agentterm", *, status: int = 143) -> Story:
    """Return a job that was asked to stop at step 15 and did, whose agent ended with a status, and that went on."""
    told = story(kind)
    told.tell("snapshot.saved", 5.1, step=15, path="step-00000015.pt")
    told.tell("run.stopped", 5.2, step=15)
    told.note("agent.ended", 5.3, node=0, status=status, fault=0)
    told.note("agent.started", 5.4, node=0)
    return told


def killed_cluster(kind: str = "agent", *, resumed_at: int = 10) -> Story:
    """Return a job whose agent was killed at step 15, and that went on from the snapshot of step 10."""
    told = story(kind, resumed_at=resumed_at)
    told.note("agent.ended", 5.1, node=0, status=-9, fault=0)
    told.note("agent.started", 5.2, node=0)
    if kind == "damage":
        told.tell("snapshot.saved", 4.5, step=14, path="step-00000014.pt")
        told.note("snapshot.damaged", 5.15, step=14, path="step-00000014.pt")
        told.tell("snapshot.rejected", 7.9, level="warning", path="step-00000014.pt")
        assert told.snapshots is not None
        told.snapshots.append(
            {"verdict": "set aside", "step": 14, "path": "step-00000014.pt.rejected", "weights_sha256": None}
        )
    return told


def set_to(facts: Facts, **changes: object) -> None:
    """Change some facts."""
    facts.update(changes)


def verdict_of(name: str, told: Story) -> str:
    """Return what the checker of a name says."""
    (finding,) = [finding for check in CHECKERS for finding in [check(told.history())] if finding.name == name]
    assert finding.evidence
    return finding.verdict


CHECKED = ("end", "weights", "steps", "epochs", "samples", "snapshots", "position", "log", "leftovers")


def test_all_checkers_are_named_here() -> None:
    """No checker is left out of the tests below."""
    assert tuple(check(story().history()).name for check in CHECKERS) == CHECKED


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.parametrize("told", [story(), stopped(), stopped("term"), killed_cluster(), killed_cluster("damage")])
def test_valid(name: str, told: Story) -> None:
    """Of a job that went well, each checker says `valid`."""
    assert verdict_of(name, told) == "valid"


BUGS: list[tuple[str, str, Spoil]] = [
    ("end", "overdue", lambda told: told.note("job.overdue", 19.0, reason="no new step within 9 s")),
    ("end", "an agent failed by itself", lambda told: told.note("agent.ended", 6.0, node=0, status=1, fault=None)),
    ("end", "an agent ended with its worker", lambda told: told.note("agent.ended", 6.0, node=0, status=-9, fault=0)),
    ("end", "it ended unfinished", lambda told: told.drop("run.finished")),
    ("end", "too slow", lambda told: setattr(told, "terms", Terms(job_seconds=20.0))),
    ("weights", "other weights", lambda told: set_to(told.event("run.finished"), weights_sha256=OTHER_SHA256)),
    ("weights", "the file has others", lambda told: set_to(told.snapshots[0], weights_sha256=OTHER_SHA256)),  # type: ignore[index]
    ("weights", "another optimizer", lambda told: setattr(told, "difference", "1 keys differ, first optimizer/0")),
    ("steps", "a step too many", lambda told: set_to(told.event("run.finished"), step=NUM_STEPS + 1)),
    ("epochs", "another loss", lambda told: set_to(told.event("epoch.finished"), train_loss=0.5000000001)),
    ("epochs", "another accuracy", lambda told: set_to(told.event("epoch.finished"), test_accuracy=0.91)),
    ("epochs", "an epoch is not told", lambda told: told.events.remove(told.event("epoch.finished"))),
    ("samples", "the audit says so", lambda told: setattr(told, "audit", ("invalid", "sample 7 twice"))),
    ("snapshots", "a damaged one", lambda told: set_to(told.snapshots[1], verdict="damaged")),  # type: ignore[index]
    ("snapshots", "no manifest", lambda told: set_to(told.snapshots[1], verdict="uncommitted")),  # type: ignore[index]
    ("snapshots", "a good one set aside", lambda told: set_to(told.snapshots[1], verdict="set aside")),  # type: ignore[index]
    ("position", "two steps back", lambda told: set_to(told.event("run.started", 1), step=13)),
    ("log", "a torn line", lambda told: told.unreadable.append('{"event": "run.st')),
    ("log", "rank 1 informs", lambda told: set_to(told.event("train.progress"), rank=1)),
    ("log", "two writers", lambda told: set_to(told.event("train.progress"), generation=0)),
    ("log", "a generation twice", lambda told: told.tell("run.started", 8.1, step=15)),
    ("log", "two ends", lambda told: told.tell("run.finished", 19.3, step=NUM_STEPS, weights_sha256=SHA256)),
    ("log", "another run", lambda told: set_to(told.event("run.started", 1), run_id="cd")),
    ("leftovers", "a process", lambda told: set_to(told.notes[-1], processes=["123"])),
    ("leftovers", "a temporary file", lambda told: set_to(told.notes[-1], temporary_files=["snapshots/.x.tmp"])),
    ("leftovers", "shared memory", lambda told: set_to(told.notes[-1], shared_memory=["elastic_mnist"])),
]


@pytest.mark.parametrize(("name", "spoil"), [pytest.param(n, s, id=f"{n}: {what}") for n, what, s in BUGS])
def test_invalid(name: str, spoil: Spoil) -> None:
    """Each checker says `invalid` of the bug that is planted in what it looks at."""
    told = story()
    spoil(told)
    assert verdict_of(name, told) == "invalid"


def test_each_checker_has_a_planted_bug() -> None:
    """The table above leaves no checker out."""
    assert {name for name, _, _ in BUGS} == set(CHECKED)


GAPS: list[tuple[str, str, Spoil]] = [
    ("end", "no notes", lambda told: told.notes.clear()),
    ("weights", "no calm end", lambda told: told.calm_events.clear()),
    ("weights", "no calm snapshot", lambda told: told.calm_snapshots.clear()),
    ("weights", "no end", lambda told: told.drop("run.finished")),
    ("weights", "not compared", lambda told: setattr(told, "difference", None)),
    ("steps", "no end", lambda told: told.drop("run.finished")),
    ("epochs", "no calm epochs", lambda told: told.calm_events.clear()),
    ("epochs", "no end", lambda told: told.drop("run.finished")),
    ("samples", "no ledgers", lambda told: setattr(told, "audit", ("unknown", "no ledgers there"))),
    ("snapshots", "none", lambda told: setattr(told, "snapshots", [])),
    ("snapshots", "not to be read", lambda told: setattr(told, "snapshots", None)),
    ("position", "no starts", lambda told: told.drop("run.started")),
    ("log", "no log", lambda told: told.events.clear()),
    ("leftovers", "nobody looked", lambda told: told.drop("leftovers")),
]


@pytest.mark.parametrize(("name", "spoil"), [pytest.param(n, s, id=f"{n}: {what}") for n, what, s in GAPS])
def test_unknown(name: str, spoil: Spoil) -> None:
    """Where the evidence is missing, a checker says neither `valid` nor `invalid`."""
    told = story()
    spoil(told)
    assert verdict_of(name, told) == "unknown"


def test_each_checker_can_say_that_it_does_not_know() -> None:
    """The table above leaves no checker out."""
    assert {name for name, _, _ in GAPS} == set(CHECKED)


# Faults


def test_a_fault_that_was_survived() -> None:
    """When it was noticed, when the job was back at its step, and what it cost, are told; the verdict is `valid`."""
    outcome = story().outcome()
    assert outcome.verdict == "valid"
    assert (outcome.step, outcome.detected_seconds, outcome.recovered_seconds, outcome.num_lost_steps) == (
        15,
        0.5,
        3,
        0,
    )


def test_a_fault_that_did_not_fire() -> None:
    """Without the mark of each of its ranks a fault proves nothing: `unknown`."""
    told = story()
    told.fault = dataclasses.replace(told.fault, kind="killall", ranks=(0, 1))
    outcome = told.outcome()
    assert outcome.verdict == "unknown"
    assert outcome.step is None
    assert "rank 0" in outcome.reason


def test_a_killed_worker_may_cost_one_step() -> None:
    """The step in flight, and not one more."""
    assert story(resumed_at=14).outcome().verdict == "valid"
    outcome = story(resumed_at=13).outcome()
    assert (outcome.verdict, outcome.num_lost_steps) == ("invalid", 2)


def test_without_a_memory_tier_a_killed_worker_may_cost_what_came_after_the_newest_snapshot() -> None:
    """Back to step 10, whose snapshot was saved, and no further."""
    for resumed_at, verdict in ((10, "valid"), (9, "invalid")):
        told = story(resumed_at=resumed_at)
        told.terms = Terms(memory_every=0)
        assert told.outcome().verdict == verdict
        assert verdict_of("position", told) == verdict


@pytest.mark.parametrize("kind", ["agent", "damage"])
def test_a_killed_cluster_may_cost_what_came_after_the_newest_whole_snapshot(kind: str) -> None:
    """Back to step 10, and no further; a snapshot that was damaged on purpose does not count."""
    for resumed_at, verdict in ((10, "valid"), (9, "invalid")):
        told = killed_cluster(kind, resumed_at=resumed_at)
        assert told.outcome().verdict == verdict
        assert told.outcome().num_lost_steps == 15 - resumed_at
        assert verdict_of("position", told) == verdict


def test_a_damaged_snapshot_must_be_told() -> None:
    """One that is left out without a word is `invalid`; where there was none to damage, nothing is proved."""
    told = killed_cluster("damage")
    told.drop("snapshot.rejected")
    assert told.outcome().verdict == "invalid"
    told.drop("snapshot.damaged")
    assert told.outcome().verdict == "unknown"


def test_a_fault_that_nothing_tells_of() -> None:
    """Without a sign of detection, or of a return to its step, a fault is not survived."""
    told = story()
    told.events = [event for event in told.events if event["time"] < 5]
    told.notes = [note for note in told.notes if note["time"] < 5]
    outcome = told.outcome()
    assert outcome.verdict == "invalid"
    assert (outcome.detected_seconds, outcome.recovered_seconds, outcome.num_lost_steps) == (None, None, None)


def test_a_fault_that_is_noticed_too_late() -> None:
    """The bound is the kind's, times the patience, and `--hang_timeout` for a hang."""
    for kind, seconds, verdict in (
        ("kill", 14.9, "valid"),
        ("kill", 15.1, "invalid"),
        ("stop", 24.9, "valid"),
        ("stop", 25.1, "invalid"),
    ):
        told = story(kind)
        told.drop("peer.lost")
        told.postpone_second_generation(seconds - 3)
        assert told.outcome().detected_seconds == pytest.approx(seconds)
        assert told.outcome().verdict == verdict
        told.terms = Terms(patience=2)
        assert told.outcome().verdict == "valid"


def test_a_job_that_comes_back_too_late() -> None:
    """It is `invalid` where the job is not at its step again within the bound, although the fault was noticed."""
    told = story()
    told.postpone_second_generation(57.5)
    outcome = told.outcome()
    assert outcome.detected_seconds == 0.5
    assert outcome.verdict == "invalid"
    assert "back at its step after 60.5 s, promised are 60" in outcome.reason


@pytest.mark.parametrize("kind", ["term", "termall", "agentterm"])
def test_a_stop_must_be_in_order(kind: str) -> None:
    """A job that was asked to stop and goes on without `run.stopped` is `invalid`, unless all was saved before."""
    told = story(kind)
    told.note("agent.ended", 5.3, node=0, status=143, fault=0)
    assert told.outcome().verdict == "invalid"
    assert "was not stopped in order: the newest snapshot is that of step 10" in told.outcome().reason
    told.tell("run.stopped", 5.2, step=15)
    assert told.outcome().verdict == "valid"
    told.drop("run.stopped")
    told.tell("snapshot.saved", 4.9, step=15, path="step-00000015.pt")
    assert told.outcome().verdict == "valid"


@pytest.mark.parametrize("kind", ["term", "termall", "agentterm"])
def test_an_agent_that_was_asked_to_stop_ends_with_143(kind: str) -> None:
    """With any other status, a failure's or a crash's, no request to stop explains its end."""
    for status, verdict in ((143, "valid"), (1, "invalid"), (2, "invalid"), (-11, "invalid"), (-9, "invalid")):
        assert verdict_of("end", stopped(kind, status=status)) == verdict
    assert stopped(kind).outcome().verdict == "valid"


@pytest.mark.parametrize("kind", ["agent", "damage", "agentterm"])
def test_an_agent_that_was_to_end_may_not_go_on(kind: str) -> None:
    """Where a fault is an agent's end, an agent that lives on is `invalid`; a worker's stop may be its own."""
    told = stopped() if kind == "agentterm" else killed_cluster(kind)
    told.notes = [note for note in told.notes if note.get("fault") is None]
    assert told.outcome().verdict == "invalid"
    assert "the agent did not end with status" in told.outcome().reason
    told = stopped("term")
    told.notes = [note for note in told.notes if note.get("fault") is None]
    assert told.outcome().verdict == "valid"


@pytest.mark.parametrize(("kind", "after"), [("grow", 4), ("shrink", 1)])
def test_a_node_that_comes_or_goes_changes_the_world(kind: str, after: int) -> None:
    """A generation of the same size, or of one changed the wrong way, is `invalid`."""
    for world_size, verdict in ((after, "valid"), (2, "invalid"), (1 if kind == "grow" else 4, "invalid")):
        told = story(kind)
        told.event("run.started", 1)["world_size"] = world_size
        assert told.outcome().verdict == verdict


@pytest.mark.parametrize(("kind", "after"), [("grow", 4), ("shrink", 1)])
def test_a_node_may_need_a_second_generation(kind: str, after: int) -> None:
    """Where the next generation is one of the same size, and the one after that has the change, it is `valid`."""
    told = story(kind)
    late = {**told.event("run.started", 1), "generation": 2, "world_size": after}
    told.events.insert(told.events.index(told.event("run.started", 1)) + 1, late)
    told.event("run.started", 1)["world_size"] = 2
    assert told.outcome().verdict == "valid"


def test_a_node_that_comes_too_late_proves_nothing() -> None:
    """A job that finishes before the newcomer is there: `unknown`."""
    told = story("grow")
    told.drop("run.started")
    for event in told.events:
        event["generation"] = 0
    assert told.outcome().verdict == "unknown"


def test_a_poisoned_batch_is_skipped_in_passing() -> None:
    """`step.skipped` of that step, and a later step of the same generation; without the event it is `invalid`."""
    told = story("nan")
    told.tell("train.progress", 5.3, step=16)
    assert told.outcome().verdict == "invalid"
    told.tell("step.skipped", 5.1, level="warning", step=15)
    outcome = told.outcome()
    assert outcome.verdict == "valid"
    assert outcome.num_lost_steps == 0


def test_the_next_fault_ends_the_time_of_the_one_before() -> None:
    """What is told after the next fault fired is no evidence for the first; its own mark, at a later step, is."""
    told = story()
    told.marks.append({"fault": 1, "rank": 0, "step": 17, "generation": 1, "world_size": 2, "time": 7.5})
    told.events = [event for event in told.events if event["time"] != 5.5]
    history = dataclasses.replace(told.history(), faults=(told.fault, Fault(kind="kill", step=17, ranks=(0,))))
    outcome = judge_fault(history, 0)
    assert outcome.detected_seconds is None
    assert outcome.recovered_seconds == 2.5


def test_overall() -> None:
    """One `invalid` decides, then one `unknown`; of nothing nothing is known."""
    assert overall(["valid", "unknown", "invalid"]) == "invalid"
    assert overall(["valid", "unknown"]) == "unknown"
    assert overall(["valid", "valid"]) == "valid"
    assert overall([]) == "unknown"

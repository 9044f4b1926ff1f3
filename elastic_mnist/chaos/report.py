"""What people and machines are told: the plan before, the verdicts after."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from elastic_mnist.chaos.checkers import Finding, Outcome
from elastic_mnist.chaos.plan import KINDS, Fault

_HEAD: Final = ("#", "fault", "coordinate", "fired", "detected", "recovered", "lost", "verdict", "")


def plan_lines(faults: Sequence[Fault]) -> Iterator[str]:
    """Return a plan, a fault a line."""
    rows = [(str(number), fault.kind, fault.coordinate, _text(fault)) for number, fault in enumerate(faults, start=1)]
    return _aligned(rows)


def _text(fault: Fault) -> str:
    text = KINDS[fault.kind].text
    return text.replace("0 or 1", str(fault.argument)) if fault.kind == "exit" else text


def outcome_lines(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Return the table of the faults; a remark only where something is amiss."""
    return _aligned([_HEAD, *(_row(number, outcome) for number, outcome in enumerate(outcomes, start=1))])


def _row(number: int, outcome: Outcome) -> tuple[str, ...]:
    fault, step = outcome.fault, outcome.step
    return (
        str(number),
        fault.kind,
        fault.coordinate,
        "no" if step is None else "yes" if step == fault.step else f"at {step}",
        _seconds(outcome.detected_seconds),
        _seconds(outcome.recovered_seconds),
        "-" if outcome.num_lost_steps is None else str(outcome.num_lost_steps),
        outcome.verdict,
        "" if outcome.verdict == "valid" else outcome.reason,
    )


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"


def finding_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Return the verdicts on the job, a promise a line."""
    return _aligned([(finding.verdict, finding.name, finding.evidence) for finding in findings])


def plain(outcomes: Sequence[Outcome], findings: Sequence[Finding], **facts: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """Return all of it as JSON-ready values."""
    return {
        **facts,
        "faults": [{**vars(outcome), "fault": outcome.fault.to_plain()} for outcome in outcomes],
        "checks": [vars(finding) for finding in findings],
    }


def _aligned(rows: Sequence[Iterable[str]]) -> Iterator[str]:
    table = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()

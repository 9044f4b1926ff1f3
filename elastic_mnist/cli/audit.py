"""`elastic-mnist audit DIR`: was each sample of each epoch used exactly once?"""

from pathlib import Path
from typing import Final

from elastic_mnist.telemetry.audit import audit_files

_STATUS: Final = {"valid": 0, "invalid": 1, "unknown": 3}
_MAX_SHOWN: Final = 5


def run(directory: Path, *, event_log: Path | None, run_id: str | None) -> int:
    """Print the verdict; return its exit status."""
    audited = audit_files(directory, event_log=event_log, run_id=run_id)
    report = audited.report
    lines = [f"{report.verdict:9} run {audited.run_id}"]
    if report.verdict != "valid":
        lines.append(f"          by the event log {audited.event_log}")
    lines.append(f"          {report.num_steps} committed steps with {report.num_samples} samples")
    lines.append(f"          {report.num_epochs} whole epochs")
    for generation, count in sorted(report.replayed.items()):
        lines.append(f"          generation {generation}: {count} steps did not count and were made again")
    if report.skipped:
        steps = ", ".join(map(str, report.skipped))
        lines.append(f"          {len(report.skipped)} of the steps had no finite gradient and were skipped: {steps}")
    for kind, findings in (("invalid", report.invalid), ("unknown", report.unknown)):
        lines += [f"{kind:9} {finding}" for finding in findings[:_MAX_SHOWN]]
        if len(findings) > _MAX_SHOWN:
            lines.append(f"{kind:9} and {len(findings) - _MAX_SHOWN} more")
    print("\n".join(lines))  # noqa: T201 - printing is what a tool does
    return _STATUS[report.verdict]

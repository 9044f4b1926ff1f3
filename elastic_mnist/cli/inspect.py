"""`elastic-mnist inspect PATH_OR_URL`: which snapshots are there, and are they whole?

`snapshots.listing` explains the verdicts on a snapshot; `--no_verify` reads manifests only.

`--json` prints one object: `location`; `verdict`, which is `whole`, `damaged`, `unreadable` or `empty`; `num_whole` and
so on; of the run's record `run_id`, `generation`, `is_finished`, `started_at`, `num_lost_steps`, `resumed_from`, and
`contract_lr` and so on, or `record_damage` alone; and `snapshots`, the newest first, objects with the attributes of
`Entry` and `age_seconds`. Unknown values are null.
"""

import json
import textwrap
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Final

from elastic_mnist.errors import EXIT_USAGE
from elastic_mnist.snapshots.listing import BAD, GOOD, NEUTRAL, Entry, Listing, look

_STATUS: Final = {"whole": 0, "damaged": 1, "unreadable": EXIT_USAGE, "empty": 3}
_COLUMNS: Final = ("verdict", "step", "epoch", "samples", "accuracy", "size", "age", "run", "generation")
_WIDTH: Final = 100


def run(location: str, *, verify: bool, as_json: bool) -> int:
    """Print what is there; return the exit status."""
    listing = look(location, verify=verify)
    lines = [json.dumps(_plain(listing))] if as_json else _lines(listing)
    for line in lines:
        print(line)  # noqa: T201 - printing is what a tool does
    return _STATUS[listing.verdict]


def _plain(listing: Listing) -> dict[str, Any]:
    """Return a listing as the object of `--json`."""
    record: dict[str, Any] = {}
    for key, value in (listing.record.to_plain() if listing.record else {}).items():
        record |= {f"{key}_{name}": inner for name, inner in value.items()} if isinstance(value, dict) else {key: value}
    return {
        "location": listing.location,
        "verdict": listing.verdict,
        **{f"num_{verdict.replace(' ', '_')}": listing.counts[verdict] for verdict in (*GOOD, *BAD, *NEUTRAL)},
        **({"record_damage": listing.record_damage} if listing.record_damage else {}),
        **record,
        "snapshots": [{**asdict(entry), "age_seconds": entry.age_seconds} for entry in listing.entries],
    }


def _lines(listing: Listing) -> Iterable[str]:
    """Return a listing as people read it."""
    yield listing.location
    if listing.record_damage:
        yield f"damaged: {listing.record_damage}"
    if listing.record is not None:
        record = listing.record
        ending = "finished" if record.is_finished else "not finished"
        lost = f"{record.num_lost_steps} steps lost and made again"
        yield f"run {record.run_id}: {ending}, generation {record.generation}, {lost}"
        if record.resumed_from:
            yield f"    began from {record.resumed_from}"
        contract = ", ".join(f"{key} {value!s:.20}" for key, value in record.contract.items() if value is not None)
        yield from textwrap.wrap(contract, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    if not listing.entries:
        yield "no snapshots"
        return
    rows = [_COLUMNS, *(_row(entry) for entry in listing.entries)]
    used = [index for index in range(len(_COLUMNS)) if any(row[index] for row in rows[1:])]
    widths = {index: max(len(row[index]) for row in rows) for index in used}
    notes = [(), *(_notes(entry) for entry in listing.entries)]
    for row, remarks in zip(rows, notes, strict=True):
        cells = [row[index].ljust(widths[index]) if not index else row[index].rjust(widths[index]) for index in used]
        yield "  ".join(cells).rstrip()
        yield from (f"    {remark}" for remark in remarks)
    yield ", ".join(f"{number} {verdict}" for verdict, number in sorted(listing.counts.items()))


def _row(entry: Entry) -> tuple[str, ...]:
    age, size = entry.age_seconds, entry.size_bytes
    cells: tuple[object, ...] = (
        entry.verdict,
        entry.step,
        entry.epoch,
        entry.samples_in_epoch,
        None if entry.test_accuracy is None else f"{entry.test_accuracy:.4f}",
        None if size is None else f"{size / 1e6:.1f} MB",
        None if age is None else _spelled(age),
        entry.run_id,
        entry.generation,
    )
    return tuple("" if cell is None else str(cell) for cell in cells)


def _notes(entry: Entry) -> tuple[str, ...]:
    """Return what is said of an entry beneath its row."""
    kind = (entry.kind,) if entry.kind else ()
    reason = (entry.reason,) if entry.reason else ()
    return (*kind, *reason, *(f"lacks {text}" for text in entry.lacking))


def _spelled(seconds: float) -> str:
    """Return a duration in its largest unit."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"

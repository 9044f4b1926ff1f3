"""Records from plain values: what `asdict` made comes back, and nothing that the annotations do not allow."""

import json
from dataclasses import asdict, dataclass
from typing import Any

import pytest
from places import HOLDER
from states import manifest_of, run_config, small_state

from elastic_mnist.snapshots.manifest import Manifest
from elastic_mnist.snapshots.plain import from_plain
from elastic_mnist.snapshots.record import RunRecord
from elastic_mnist.snapshots.state import pack


@dataclass(frozen=True, kw_only=True)
class Inner:
    """A record in a record."""

    number: int


@dataclass(frozen=True, kw_only=True)
class Outer:
    """A record of every kind of field."""

    flag: bool
    seconds: float
    text: str | None
    numbers: tuple[int, ...]
    content: dict[str, int]
    inner: Inner
    other: Inner | None = None


OUTER = Outer(flag=True, seconds=1.5, text=None, numbers=(1, 2), content={"a": 1}, inner=Inner(number=3))


@pytest.mark.parametrize("other", [None, Inner(number=4)])
def test_what_json_made_of_a_record_comes_back(other: Inner | None) -> None:
    """Tuples, records in records and None too."""
    record = Outer(**{**vars(OUTER), "other": other})
    assert from_plain(Outer, json.loads(json.dumps(asdict(record)))) == record


@pytest.mark.parametrize("record", [RunRecord.new(run_config(), started_at=1.0), HOLDER], ids=["run", "holder"])
def test_the_core_records_come_back(record: Any) -> None:  # noqa: ANN401 - any record
    """As the file of the run and the memory tier hold them."""
    assert from_plain(type(record), json.loads(json.dumps(asdict(record)))) == record


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("flag", 1),
        ("seconds", "1.5"),
        ("seconds", True),
        ("text", 1),
        ("numbers", ["1"]),
        ("numbers", 1),
        ("content", []),
        ("inner", 1),
        ("inner", {"number": None}),
        ("other", [1]),
    ],
)
def test_a_value_of_another_type_is_refused(field: str, value: object) -> None:
    """A TypeError, also of a number for a truth value and of a truth value for a number."""
    with pytest.raises(TypeError):
        from_plain(Outer, {**asdict(OUTER), field: value})


def test_a_missing_field_is_refused_by_name_unless_it_has_a_default() -> None:
    """Older programs did not write what has a default."""
    assert from_plain(Inner, {"number": 1, "unknown": 2}) == Inner(number=1)
    with pytest.raises(KeyError, match="number"):
        from_plain(Inner, {})
    assert from_plain(Outer, {key: value for key, value in asdict(OUTER).items() if key != "other"}) == OUTER


def test_a_manifests_values_are_of_their_types() -> None:
    """A digest that fits does not make a text a number of bytes."""
    plain = asdict(manifest_of(small_state(), pack(small_state())))
    with pytest.raises(TypeError, match="size_bytes"):
        from_plain(Manifest, {**plain, "size_bytes": "1"})

"""Frozen dataclasses from plain values, as JSON or `torch.load` gives them: the inverse of `dataclasses.asdict`.

Invariant: every field of what is returned has the type that its annotation says.
"""

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

Record = TypeVar("Record")


def from_plain(cls: type[Record], content: Mapping[str, Any]) -> Record:
    """Build a dataclass; fields that `content` lacks get their defaults, keys that are no field are ignored.

    Raises:
        KeyError: a field without a default is missing.
        TypeError: a value is not of its field's type, or `content` is no mapping.
    """
    if not is_dataclass(cls) or not isinstance(content, Mapping):
        raise TypeError(f"a {type(content).__name__} is no {cls.__name__}")
    hints = typing.get_type_hints(cls)
    known: dict[str, Any] = {}
    for field in fields(cls):
        if field.name in content:
            known[field.name] = _read(field.name, content[field.name], hints[field.name])
        elif field.default is MISSING and field.default_factory is MISSING:
            raise KeyError(field.name)
    return typing.cast("Record", cls(**known))


def is_of_type(value: object, hint: Any) -> bool:  # noqa: ANN401 - a type or a form of `typing`
    """Whether a value has an annotated type; of a container, its own type alone is looked at."""
    if _is_union(hint):
        return any(is_of_type(value, member) for member in typing.get_args(hint))
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    kind = dict if typing.is_typeddict(hint) else typing.get_origin(hint) or hint
    return isinstance(value, kind)


def _read(name: str, value: Any, hint: Any) -> Any:  # noqa: ANN401 - any plain value, of any annotated type
    for member in typing.get_args(hint) if _is_union(hint) else (hint,):
        if is_dataclass(member) and isinstance(member, type) and isinstance(value, Mapping):
            return from_plain(member, value)
        if typing.get_origin(member) is tuple and isinstance(value, list):  # JSON has no tuples
            return tuple(_read(name, part, typing.get_args(member)[0]) for part in value)
    if not is_of_type(value, hint):
        raise TypeError(f"{name} is {value!r}")
    return value


def _is_union(hint: Any) -> bool:  # noqa: ANN401 - as above
    return typing.get_origin(hint) in (typing.Union, types.UnionType)

"""Frozen dataclasses to JSON and back: strict, so that the classes are the schema.

Owns the conversion of nested dataclasses, tuples, dictionaries and optional values. Refuses tables
with a missing, unknown or mistyped entry, and names the place. An entry with a default may be
missing: older tables have none.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from fullshard_bench.errors import BenchError

__all__ = ["from_table", "to_table"]

T = TypeVar("T")


def to_table(record: Any) -> dict[str, Any]:
    """The nested dictionaries and lists that `from_table` builds the record from."""
    return {field.name: _plain(getattr(record, field.name)) for field in dataclasses.fields(record)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_table(value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value


def from_table(kind: type[T], table: Any, where: str = "") -> T:
    """The record of class `kind` that `table` describes.

    Raises:
        BenchError: an entry is missing, unknown or of another type; the message names the entry.
    """
    if not isinstance(table, dict):
        raise BenchError(f"{where or 'result'}: must be an object, not {type(table).__name__}")
    hints = get_type_hints(kind)
    for name in table:
        if name not in hints:
            raise BenchError(f"{where}{name}: no such entry; allowed: {', '.join(hints)}")
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]  # it is a dataclass
        if field.name not in table and field.default is dataclasses.MISSING:
            raise BenchError(f"{where}{field.name}: is missing")
    there = [name for name in hints if name in table]
    return kind(**{name: _read(hints[name], table[name], where + name) for name in there})


def _read(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        (hint,) = (each for each in arguments if each is not type(None))
        return _read(hint, value, where)
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return from_table(hint, value, f"{where}.")
    if origin is tuple:
        _require(isinstance(value, list), where, value, "a list")
        return tuple(_read(arguments[0], each, f"{where}[{i}]") for i, each in enumerate(value))
    if origin is dict:
        _require(isinstance(value, dict), where, value, "an object")
        return {key: _read(arguments[1], each, f"{where}.{key}") for key, each in value.items()}
    if hint is float and type(value) is int:
        return float(value)
    if hint is not Any:
        _require(type(value) is hint, where, value, f"of type {getattr(hint, '__name__', hint)}")
    return value


def _require(condition: bool, where: str, value: object, allowed: str) -> None:
    if not condition:
        raise BenchError(f"{where} = {value!r}: must be {allowed}")

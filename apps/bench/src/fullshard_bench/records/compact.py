"""JSON that people can read and diff: a line for each small value."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["compact_json"]

_WIDTH = 120


def compact_json(value: Any, depth: int = 0) -> str:
    """Return the value as JSON, with one line for each value that is small or has no parts.

    Args:
        value: dictionaries with string keys, lists, text, numbers, booleans and None.
        depth: number of spaces before the closing bracket.
    """
    line = json.dumps(value)
    if depth + len(line) <= _WIDTH:
        return line
    keyed = isinstance(value, dict)
    if isinstance(value, dict):
        parts = list(value.items())
    else:
        parts = [("", part) for part in value] if isinstance(value, list) else []
    if not any(isinstance(part, (dict, list)) for _, part in parts):
        return line
    pad = " " * (depth + 1)
    rows = [
        f"{pad}{json.dumps(key) + ': ' if keyed else ''}{compact_json(part, depth + 1)}"
        for key, part in parts
    ]
    first, last = "{}" if keyed else "[]"
    return "\n".join([first, ",\n".join(rows), " " * depth + last])

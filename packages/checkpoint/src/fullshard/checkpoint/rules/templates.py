"""Name templates such as ``layers.{i}.mlp.{*rest}``: they match names, and make them of fields.

Owns the syntax: ``{field}`` stands for text without a dot, ``{*field}`` for any text. A template
    works in both directions, for loading and for saving; a regular expression does not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

__all__ = ["fields_of", "filled", "matched"]

_FIELD = re.compile(r"\{(\*?)([A-Za-z_]\w*)\}")


@lru_cache(maxsize=4096)
def _pattern(template: str) -> re.Pattern[str]:
    pattern, at, seen = "", 0, set[str]()
    for found in _FIELD.finditer(template):
        pattern += re.escape(template[at : found.start()])
        star, field = found.groups()
        if field in seen:
            pattern += f"(?P={field})"
        else:
            pattern += f"(?P<{field}>{'.+' if star else '[^.]+'})"
        seen.add(field)
        at = found.end()
    return re.compile(pattern + re.escape(template[at:]))


def fields_of(template: str) -> frozenset[str]:
    """Return the names of the fields of ``template``."""
    return frozenset(found.group(2) for found in _FIELD.finditer(template))


def matched(template: str, name: str) -> dict[str, str] | None:
    """Return the fields with which ``template`` makes ``name``; None if it cannot."""
    found = _pattern(template).fullmatch(name)
    return None if found is None else found.groupdict()


def filled(template: str, fields: Mapping[str, str]) -> str:
    """Return ``template`` with its fields replaced by their text."""
    return _FIELD.sub(lambda found: fields[found.group(2)], template)

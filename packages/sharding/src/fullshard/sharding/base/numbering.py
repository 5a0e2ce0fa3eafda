"""Names of modules and parameters without the numbers of what is not sharded.

Owns the counting anew of numbers in names, so that ranks compare what they communicate: in a list
of which each rank ignores others, and another number of them, what is sharded has other numbers.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

__all__ = ["Numbering"]

_NAME = re.compile(r"[^\s,]+")


class Numbering:
    """The places of numbered children among those of their parent that are sharded."""

    def __init__(self, names: Iterable[str]) -> None:
        """Counts the numbered children in ``names``, which are full names of what is sharded."""
        found: dict[tuple[str, ...], set[str]] = defaultdict(set)
        for name in names:
            parts = tuple(name.split("."))
            for index, part in enumerate(parts):
                if part.isdigit():
                    found[parts[:index]].add(part)
        self._places = {
            (*parent, number): str(place)
            for parent, numbers in found.items()
            for place, number in enumerate(sorted(numbers, key=int))
        }

    def of(self, text: str) -> str:
        """Returns ``text``, one name or several with commas between, with places for numbers."""
        return _NAME.sub(lambda match: self._renumbered(match.group()), text)

    def _renumbered(self, name: str) -> str:
        parts = tuple(name.split("."))
        places = self._places
        return ".".join(places.get(parts[: i + 1], part) for i, part in enumerate(parts))

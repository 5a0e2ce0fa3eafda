"""Memory over a step: the most at each place, and what it consisted of at that moment.

``Course`` keeps the changes of sizes in their order. What a storage is for is known only at the
end, so ``parts`` goes through the changes again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fullshard.preflight.planning.memory.places import Place

__all__ = ["Course", "Moment"]


@dataclass(frozen=True, slots=True)
class Moment:
    """When a place had the most memory.

    Attributes:
        nbytes: how much.
        changes: how many changes of sizes came before.
        inside: the part inside operations and collectives, behind no tensor.
    """

    nbytes: int
    changes: int
    inside: int


class Course:
    """The most memory at each place of a step."""

    def __init__(self) -> None:
        self._changes: list[tuple[int, int]] = []
        self._most: dict[Place, Moment] = {}

    def restart(self, sizes: Mapping[int, int]) -> None:
        """Start a step. ``sizes``: bytes of each storage that is alive, by its number."""
        self._changes = list(sizes.items())
        self._most = {}

    def changed(self, number: int, more: int) -> None:
        """Note that a storage has ``more`` bytes than before; a negative number: fewer."""
        self._changes.append((number, more))

    def look(self, place: Place, nbytes: int, inside: int) -> None:
        """Note the bytes that are alive at a place, with those inside operations."""
        most = self._most.get(place)
        if most is None or nbytes > most.nbytes:
            self._most[place] = Moment(nbytes, len(self._changes), inside)

    def totals(self) -> dict[Place, int]:
        """Return the most bytes at each place, in the order of the step."""
        return {place: each.nbytes for place, each in self._most.items()}

    def parts(self, kind_of: Callable[[int], int], inside: int) -> dict[Place, dict[int, int]]:
        """Return what each total consists of: bytes by kind, which add up to the total.

        Args:
            kind_of: returns the kind of a storage, by its number.
            inside: the kind of the memory inside operations and collectives.
        """
        found: dict[Place, dict[int, int]] = {place: {} for place in self._most}
        now: dict[int, int] = {}
        done = 0
        for place, moment in sorted(self._most.items(), key=lambda item: item[1].changes):
            for number, more in self._changes[done : moment.changes]:
                kind = kind_of(number)
                now[kind] = now.get(kind, 0) + more
            done = moment.changes
            found[place] = {**now, inside: now.get(inside, 0) + moment.inside}
        return found

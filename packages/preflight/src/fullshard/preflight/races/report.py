"""The findings of a race check, as readable text."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

__all__ = ["OUTSIDE", "Access", "Kind", "Race", "RaceError", "RaceReport"]

OUTSIDE = (
    "a model communicates on streams that are not simulated here, so its races would not be seen: "
    "it was sharded and used before the watch began, or is not on the CPU; call fully_shard inside"
)
"""Why a watch refuses a model."""


class Kind(enum.Enum):
    """A conflict between two operations."""

    ACCESS = "no event orders two streams that use the same memory"
    ALLOCATED = "memory is used before the stream that allocated it came to that"
    FREED = "memory is freed, and allocated anew while another stream may still use it"
    GONE = "memory is used after it was freed; the program was stopped there"


@dataclass(frozen=True, slots=True)
class Access:
    """An operation in a race.

    Attributes:
        operation: the operator's name; "freed" for the end of memory.
        stream: where it runs, or "host".
        line: the source line that issued it, and the user's line if that is another.
        writes: whether it writes.
    """

    operation: str
    stream: str
    line: str
    writes: bool

    def __str__(self) -> str:
        """Return the text for a report."""
        verb = "writes" if self.writes else "reads"
        does = "" if self.operation == "freed" else f" {verb} it"
        return f"{self.operation}{does} on stream {self.stream!r}, {self.line}"


@dataclass(frozen=True, slots=True)
class Race:
    """Two operations in an order that nothing guarantees.

    Attributes:
        kind: what is wrong.
        memory: the parameter or buffer.
        first: what was issued first.
        second: what was issued after it.
        reused: of freed memory, what may be given it next.
    """

    kind: Kind
    memory: str
    first: Access
    second: Access
    reused: Access | None = None

    def __str__(self) -> str:
        """Return the text for a report."""
        again = "" if self.reused is None else f"\n    which may go to {self.reused}"
        return f"{self.memory}: {self.kind.value}\n    {self.first}\n    {self.second}{again}"


class RaceError(AssertionError):
    """A program has races, or was not watched in a way that would show them."""


@dataclass
class RaceReport:
    """The races of a program. The report is complete when the watch has ended.

    Attributes:
        races: each pair of lines once, with how often it was seen.
        operations: how many were looked at, by stream.
        collectives: how many the engine launched.
        expects_collectives: whether it shows nothing if the engine launched none.
        outside: whether a model communicated on streams outside of the watch.
        ended: whether the watch came to its end.
    """

    races: dict[Race, int] = field(default_factory=dict)
    operations: dict[str, int] = field(default_factory=dict)
    collectives: int = 0
    expects_collectives: bool = True
    outside: bool = False
    ended: bool = False

    @property
    def doubt(self) -> str:
        """Why it would mean nothing that no race is reported; empty if it means something."""
        if not self.ended:
            return "the watch has not come to its end; look at the report after it"
        if self.outside:
            return OUTSIDE
        if self.expects_collectives and not self.collectives:
            return (
                "the engine launched no collective while it was watched; call fully_shard and "
                "train inside, over more than one rank: check(program, mesh=4). If the program is "
                "to have none, pass expect_collectives=False"
            )
        return ""

    @property
    def ok(self) -> bool:
        """Whether there are none, and what was watched would have shown some."""
        return not self.races and not self.doubt

    def raise_if_any(self) -> None:
        """Return if there are no races, and what was watched would have shown some.

        Raises:
            RaceError: with all of them, or with the doubt.
        """
        if not self.ok:
            raise RaceError(str(self))

    def __str__(self) -> str:
        """Return all races, or the doubt, and the amount of checked work."""
        by_stream = ", ".join(f"{name} {count}" for name, count in self.operations.items())
        seen = (
            f"{sum(self.operations.values())} operations on {len(self.operations)} streams "
            f"({by_stream}), {self.collectives} collectives of the engine"
        )
        if not self.races:
            doubt = self.doubt
            return (
                f"not shown to be free of races: {doubt}; {seen}" if doubt else f"no races; {seen}"
            )
        found = [
            f"{race}\n    seen {count} times" if count > 1 else str(race)
            for race, count in self.races.items()
        ]
        return "\n".join([f"{len(found)} races; {seen}", *found])

"""What was found, for people to read."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

__all__ = ["Access", "Kind", "Race", "RaceError", "RaceReport"]


class Kind(enum.Enum):
    """What two operations do to each other."""

    ACCESS = "no event orders two streams that use the same memory"
    ALLOCATED = "memory is used before the stream that allocated it came to that"
    FREED = "memory is freed, and allocated anew while another stream may still use it"


@dataclass(frozen=True, slots=True)
class Access:
    """One of the two operations of a race.

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
        """As a report says it."""
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
        """As a report says it."""
        again = "" if self.reused is None else f"\n    which may go to {self.reused}"
        return f"{self.memory}: {self.kind.value}\n    {self.first}\n    {self.second}{again}"


class RaceError(AssertionError):
    """A program has races."""


@dataclass
class RaceReport:
    """The races of a program. It is complete when the watch has ended.

    Attributes:
        races: each pair of lines once, with how often it was seen.
        operations: how many were looked at, by stream.
    """

    races: dict[Race, int] = field(default_factory=dict)
    operations: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether there are none."""
        return not self.races

    def raise_if_any(self) -> None:
        """Returns if there are no races.

        Raises:
            RaceError: with all of them.
        """
        if self.races:
            raise RaceError(str(self))

    def __str__(self) -> str:
        """All races, and what was looked at."""
        streams = ", ".join(f"{name} {count}" for name, count in self.operations.items())
        if not self.races:
            return f"no races; operations by stream: {streams}"
        found = [
            f"{race}\n    seen {count} times" if count > 1 else str(race)
            for race, count in self.races.items()
        ]
        return "\n".join([f"{len(found)} races; operations by stream: {streams}", *found])

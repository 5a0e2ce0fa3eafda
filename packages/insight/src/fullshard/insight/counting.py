"""Counts events by kind: how many collectives a step had, and how many bytes they carried."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fullshard.comm import Event, EventKind

__all__ = ["CommStatistics", "StatisticsObserver"]


@dataclass(frozen=True, kw_only=True)
class CommStatistics:
    """How often each kind of event happened and how many bytes it carried; 0 if it never did.

    Attributes:
        counts: the number of events of each kind.
        nbytes: the bytes of all events of each kind.
    """

    counts: Mapping[EventKind, int]
    nbytes: Mapping[EventKind, int]

    def __str__(self) -> str:
        """A table as text: kind, count, bytes; only kinds that happened."""
        lines = [f"{'event':<16}{'count':>10}{'bytes':>16}"]
        for kind, count in self.counts.items():
            if count:
                lines.append(f"{kind.value:<16}{count:>10}{self.nbytes[kind]:>16}")
        return "\n".join(lines)


class StatisticsObserver:
    """An observer that only counts: constant memory, however long it listens."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(EventKind, 0)
        self._nbytes = dict.fromkeys(EventKind, 0)

    def on_event(self, event: Event) -> None:
        """Count ``event`` and its bytes."""
        with self._lock:
            self._counts[event.kind] += 1
            self._nbytes[event.kind] += event.nbytes

    def statistics(self) -> CommStatistics:
        """The counts up to now."""
        with self._lock:
            return CommStatistics(
                counts=MappingProxyType(dict(self._counts)),
                nbytes=MappingProxyType(dict(self._nbytes)),
            )

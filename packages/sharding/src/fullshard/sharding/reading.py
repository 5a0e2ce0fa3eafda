"""Gathers that read shards until they are over, not only until they are launched.

Owns the list of those under way in this process. Who writes to shards waits for them first.
"""

from __future__ import annotations

import weakref

from fullshard.comm import DirectGatherInFlight

__all__ = ["finish_reading", "note_reading"]

_under_way: weakref.WeakSet[DirectGatherInFlight] = weakref.WeakSet()


def note_reading(in_flight: DirectGatherInFlight) -> None:
    """Remembers a gather while it is under way."""
    if in_flight.work is not None:
        _under_way.add(in_flight)


def finish_reading() -> None:
    """Returns when no gather reads a shard of this process."""
    while _under_way:
        _under_way.pop().finish()

"""Race tests: a program on a simulated accelerator, and what its streams do to each other's memory.

``watch_races`` and ``check`` run the real engine with real values, or any program that asks torch
for streams by device-neutral calls. The functions report accesses that no event orders, and memory
that is freed too early.
"""

from fullshard.preflight.races.collectives import UnknownCollectiveError
from fullshard.preflight.races.report import Access, Kind, Race, RaceError, RaceReport
from fullshard.preflight.races.watch import check, keep_on_host, watch_races

__all__ = [
    "Access",
    "Kind",
    "Race",
    "RaceError",
    "RaceReport",
    "UnknownCollectiveError",
    "check",
    "keep_on_host",
    "watch_races",
]

"""A measurement that a set of ranks makes together: handed to them, and handed back, as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fullshard_bench.result import Point
from fullshard_bench.settings import Settings

__all__ = ["Job", "JobResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to measure.

    Attributes:
        settings: model, contestants and how they train.
        kind: `mesh`, or `wide` for one rank of a world in which nothing is moved.
        mesh: the mesh's text.
        trace: whether to record one step of fullshard's events.
    """

    settings: Settings
    kind: str
    mesh: str
    trace: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """The result, as the first rank reports it.

    `events` has one list per rank: of each event kind, name, bytes, stream, and microseconds since
    all ranks began the step.
    """

    point: Point
    parameters: int
    parameter_bytes: int
    item: str
    items_per_rank: int
    events: tuple[tuple[dict[str, Any], ...], ...]

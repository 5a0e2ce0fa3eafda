"""Strong and weak scaling: the best planned choice of each mesh, over its number of ranks.

Owns both definitions. Weak: each rank has the same batch, whatever the mesh. Strong: all ranks
together have one batch, that which the largest mesh has; ranks of a smaller one compute more
micro-batches. The time of a step grows linearly with them, so two plans determine any number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fullshard_bench.planning.rows import Job, Planned, Planner

__all__ = ["Scaled", "best_of", "scaled"]


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """A mesh on both curves.

    Attributes:
        row: its best choice.
        weak: items per second of all ranks, each with the batch of the row.
        weak_efficiency: of a device's speed on the smallest mesh, a part of 1.
        micro_batches: that a rank computes of the batch which all meshes share.
        strong: seconds for that batch.
        strong_efficiency: of the speed-up that so many more ranks could give, a part of 1.
    """

    row: Planned
    weak: float
    weak_efficiency: float
    micro_batches: float
    strong: float
    strong_efficiency: float


def best_of(rows: Sequence[Planned], budget: int | None) -> Planned | None:
    """The quickest row that fits; without time the first, since they come preferred first."""
    fitting = [each for each in rows if budget is None or each.peak <= budget]
    return max(fitting, key=lambda each: each.speed, default=None)


def scaled(rows: Sequence[Planned], budget: int | None, plan_rows: Planner) -> list[Scaled]:
    """The curves of meshes on which something fits, by how many ranks they have.

    Empty without time, and of fewer than two meshes.
    """
    best = {}
    for name in dict.fromkeys(str(each.job.mesh) for each in rows):
        one = best_of([each for each in rows if str(each.job.mesh) == name], budget)
        if one is not None and one.time is not None:
            best[name] = one
    found = sorted(best.values(), key=lambda each: each.job.mesh.ranks)
    if len(found) < 2:
        return []
    more = [_slope(*pair) for pair in zip(found, plan_rows(list(map(_twice, found))), strict=True)]
    most = found[-1].job.mesh.ranks
    curve: list[Scaled] = []
    for row, slope in zip(found, more, strict=True):
        ranks, times = row.job.mesh.ranks, most / row.job.mesh.ranks
        assert row.time is not None
        strong = row.time.seconds + (times - 1) * slope
        first = curve[0] if curve else None
        curve.append(
            Scaled(
                row=row,
                weak=row.speed * ranks,
                weak_efficiency=row.speed / first.row.speed if first else 1.0,
                micro_batches=times * row.job.choice.micro_batches,
                strong=strong,
                strong_efficiency=_speedup(first, strong, ranks) if first else 1.0,
            )
        )
    return curve


def _twice(row: Planned) -> Job:
    """The job with as many micro-batches again."""
    job = row.job
    return replace(
        job,
        shape=replace(job.shape, rows=2 * job.shape.rows),
        choice=replace(job.choice, micro_batches=2 * job.choice.micro_batches),
    )


def _slope(once: Planned, twice: Planned) -> float:
    assert once.time is not None and twice.time is not None
    return twice.time.seconds - once.time.seconds


def _speedup(first: Scaled, seconds: float, ranks: int) -> float:
    return first.strong / seconds * first.row.job.mesh.ranks / ranks

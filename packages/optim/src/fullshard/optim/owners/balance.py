"""Which rank owns a matrix: balanced by FLOPs over all ranks of a mesh, its replicas too.

The longest work first, each to the rank with the least (R. L. Graham, "Bounds on multiprocessing
timing anomalies", 1969): never more than 4/3 of the best. A matrix that one rank holds whole stays
there, as an expert does that is not cut: it need not travel.
"""

from __future__ import annotations

from collections.abc import Sequence

from fullshard.checkpoint.spi import Box

__all__ = ["owners_of"]


def owners_of(
    matrices: Sequence[Box],
    costs: Sequence[int],
    held: Sequence[Sequence[Box]],
    loads: list[int],
) -> list[int]:
    """Return which rank owns each matrix, and add its cost to that rank's load.

    Args:
        matrices: the box of each in its parameter.
        costs: FLOPs of each.
        held: for each, what every rank holds of its parameter.
        loads: FLOPs that each rank has to do already; changed.
    """
    parts_of = [
        [box.overlap(each).numel for each in boxes]
        for box, boxes in zip(matrices, held, strict=True)
    ]
    stays = [box.numel in parts for box, parts in zip(matrices, parts_of, strict=True)]
    owners = [0] * len(matrices)
    for at in sorted(range(len(matrices)), key=lambda at: (not stays[at], -costs[at])):
        parts, most = parts_of[at], matrices[at].numel
        able = [rank for rank, part in enumerate(parts) if part == most or not stays[at]]
        # the load decides, then who need send the least, then the number
        owner = min((loads[rank], -parts[rank], rank) for rank in able)[-1]
        loads[owner] += costs[at]
        owners[at] = owner
    return owners

"""Measured costs of collectives between the ranks of a user's process group, by size.

Owns measuring them where ranks run, on all at once, and a table of it in a file. Between two sizes
that were measured seconds are interpolated; beyond the largest the last pair's bandwidth holds.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from fullshard.preflight.costs.timing import COLLECTIVES, Caches, Moved, time_collective

__all__ = ["Links", "measure_links"]

SIZES = tuple(2**power for power in range(10, 27, 2))
"""Bytes that are measured: from 1 KiB to 64 MiB."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """Collectives among the ranks of a process group, measured.

    Attributes:
        ranks: how many.
        table: by operator name of a collective, the cost for each size in bytes.
    """

    ranks: int
    table: Mapping[str, Mapping[int, Moved]]

    def moved(self, name: str, nbytes: int) -> Moved:
        """Return the cost of a collective.

        Raises:
            ValueError: if its kind was not measured.
        """
        if name not in self.table:
            raise ValueError(
                f"{name} was not measured between these ranks; measured: "
                + ", ".join(sorted(self.table))
            )
        points = sorted(self.table[name].items())
        if len(points) == 1 or nbytes <= points[0][0]:
            return points[0][1]
        place = min(bisect.bisect_left([size for size, _ in points], nbytes), len(points) - 1)
        (low, before), (high, after) = points[place - 1], points[place]
        part = (nbytes - low) / (high - low)
        return Moved(
            before.seconds + part * (after.seconds - before.seconds),
            before.beside + part * (after.beside - before.beside),
            before.stolen + part * (after.stolen - before.stolen),
        )

    def save(self, path: str | Path) -> None:
        """Write the table as JSON."""
        rows = {
            name: {size: [m.seconds, m.beside, m.stolen] for size, m in sizes.items()}
            for name, sizes in self.table.items()
        }
        Path(path).write_text(json.dumps({"ranks": self.ranks, "collectives": rows}, indent=1))

    @classmethod
    def load(cls, path: str | Path) -> Links:
        """Read what ``save`` wrote.

        Raises:
            ValueError: if the file has other content.
        """
        try:
            read = json.loads(Path(path).read_text())
            table = {
                name: {int(size): Moved(*row) for size, row in rows.items()}
                for name, rows in read["collectives"].items()
            }
            return cls(ranks=int(read["ranks"]), table=table)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} holds no links ({error}); write it by measure_links(group).save(path)"
            ) from error


def measure_links(
    group: dist.ProcessGroup | None = None,
    *,
    names: Sequence[str] = ("_allgather_base_", "_reduce_scatter_base_", "allreduce_"),
    sizes: Sequence[int] = SIZES,
    timeout: timedelta = timedelta(seconds=60),
) -> Links:
    """Return what collectives take in a process group; every rank calls it, and gets the same.

    For the plan of a run whose ranks are on several hosts: measure there, ``save()`` the result,
    and plan with ``device=Here(links=Links.load(path))``. For each size, 11 collectives run while
    ranks wait, and 11 while ranks compute. 9 of each are timed, on memory that has left the caches;
    each as long as on its slowest rank, of which the median.

    Args:
        group: whose ranks; None: all.
        names: of the collectives' operators.
        sizes: in bytes, of an all-gather's output, a reduce-scatter's input, or the tensor of
            another collective.
        timeout: how long is waited for ranks to call it.

    Raises:
        RuntimeError: if this process is in no process group, or a rank does not call it in time; it
            says which.
        ValueError: if the group's ranks are not connected by gloo, a name is of no collective that
            can be measured, or there are no sizes.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "there is no process group to measure; start all ranks (torchrun), and call "
            'torch.distributed.init_process_group("gloo") first'
        )
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError("this rank is not in the group; only ranks of a group measure it")
    unknown = sorted(set(names) - set(COLLECTIVES))
    if unknown or not names or not sizes or min(sizes) < 1:
        raise ValueError(
            f"cannot measure {', '.join(unknown) or 'nothing'}; names must be of "
            f"{', '.join(sorted(COLLECTIVES))}, and sizes at least one number of bytes"
        )
    if "gloo" not in dist.get_backend(group):
        raise ValueError(
            f"the group's backend is {dist.get_backend(group)}; links are measured between CPU"
            ' ranks, over "gloo"'
        )
    dist.monitored_barrier(group, timeout=timeout, wait_all_ranks=True)
    caches = Caches()
    found = {(n, s): time_collective(n, s, group, caches) for n in names for s in sorted(sizes)}
    table: dict[str, dict[int, Moved]] = {name: {} for name in names}
    for (name, size), moved in found.items():
        table[name][size] = moved
    return Links(ranks=group.size(), table=table)

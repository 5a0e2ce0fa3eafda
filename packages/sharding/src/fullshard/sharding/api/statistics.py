"""Statistics of a sharded model: parameters, bytes, collectives and host time.

Owns the numbers' definitions and their layout on a page. This module measures nothing: sizes come
from the groups' plans, counts and times from what the hooks counted since the last reset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from fullshard.sharding.api.slow_ranks import SlowRanksReport

if TYPE_CHECKING:
    from fullshard.sharding.hooks.module_state import ModuleState

__all__ = ["GroupStatistics", "ShardingStatistics", "statistics_of"]


@dataclass(frozen=True, kw_only=True)
class GroupStatistics:
    """One group, on this rank.

    Attributes:
        name: full name of its module.
        parameters: how many parameters it holds.
        sharded_bytes: bytes of this rank's shards.
        gathered_bytes: bytes of the full parameters in the dtype in which they are gathered.
        padding_bytes: bytes that one gather moves beyond those, over all ranks' slices.
        gathers: gathers launched per step.
        reductions: reductions launched per step.
        host_us: microseconds per step that this rank's Python spent in the hooks of the module;
            without streams, on the CPU, waiting for collectives is part of it.
    """

    name: str
    parameters: int
    sharded_bytes: int
    gathered_bytes: int
    padding_bytes: int
    gathers: float
    reductions: float
    host_us: float


@dataclass(frozen=True, kw_only=True)
class ShardingStatistics:
    """All groups under a module. ``str()`` of it is a table.

    Attributes:
        groups: one entry per group, in the order of the modules.
        steps: backwards that ended since counting began; numbers per step are divided by this.
        slow_ranks: the own times of all ranks, if they were asked for.
    """

    groups: tuple[GroupStatistics, ...]
    steps: int
    slow_ranks: SlowRanksReport | None = None

    @property
    def total(self) -> GroupStatistics:
        """The sums over all groups."""
        numbers = [each.name for each in fields(GroupStatistics)][1:]
        sums = {name: sum(getattr(group, name) for group in self.groups) for name in numbers}
        return GroupStatistics(name=f"total of {len(self.groups)} groups", **sums)

    def __str__(self) -> str:
        """The table: a row per group, and the total."""
        rows = [_HEADS, *map(_row, self.groups), _row(self.total)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])])
            for name, *cells in rows
        ]
        rule = "-" * len(lines[0])
        below = [] if self.slow_ranks is None else ["", str(self.slow_ranks)]
        steps = f"steps: {self.steps}"
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1], steps, *below])


_HEADS = ["group", "parameters", "sharded", "gathered", "padding"]
_HEADS += ["gathers/step", "reductions/step", "host us/step"]


def _row(group: GroupStatistics) -> list[str]:
    sizes = (group.sharded_bytes, group.gathered_bytes, group.padding_bytes)
    per_step = (f"{group.gathers:.2f}", f"{group.reductions:.2f}", f"{group.host_us:.1f}")
    return [group.name, str(group.parameters), *map(_bytes, sizes), *per_step]


def _bytes(count: int) -> str:
    power = min(max(count.bit_length() - 1, 0) // 10, 4)
    return f"{count / 1024**power:.1f} {'KMGT'[power - 1]}iB" if power else f"{count} B"


def statistics_of(
    states: Sequence[ModuleState], steps: int, slow_ranks: SlowRanksReport | None = None
) -> ShardingStatistics:
    """Return the statistics of the groups that ``states`` own.

    Args:
        states: the sharded modules.
        steps: backwards that ended since counting began.
        slow_ranks: what ranks found, if they were asked.
    """
    divisor = max(1, steps)
    groups = []
    for state in states:
        for index, group in enumerate(state.own_groups):
            layout = group.gathering.layout
            gathered = sum(spec.numel * spec.dtype.itemsize for spec in layout.specs)
            moved = layout.buffer.slice_nbytes
            groups.append(
                GroupStatistics(
                    name=group.name,
                    parameters=len(group.params),
                    sharded_bytes=sum(param.shard.nbytes for param in group.params),
                    gathered_bytes=gathered,
                    padding_bytes=moved * layout.world_size - gathered,
                    gathers=group.gathering.gathers / divisor,
                    reductions=group.gradients.reductions / divisor,
                    host_us=0.0 if index else state.host_ns / divisor / 1000,
                )
            )
    return ShardingStatistics(groups=tuple(groups), steps=steps, slow_ranks=slow_ranks)

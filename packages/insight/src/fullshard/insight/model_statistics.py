"""Statistics of a sharded model: parameters, bytes, collectives and host time.

Owns ``statistics``, the numbers' definitions and their layout on a page. This module measures
nothing: sizes come from the groups' plans, counts and times from what the hooks of
``fullshard.sharding`` counted since the last reset.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import nn

from fullshard.insight.slow_ranks import SlowRanks, SlowRanksReport
from fullshard.sharding import FSDPParamGroup
from fullshard.sharding.spi import ModuleState, initialised_state, state_of, the_states

__all__ = ["GroupStatistics", "ShardingStatistics", "reset_statistics", "statistics"]


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


def statistics(module: nn.Module, *, slow_ranks: SlowRanks | None = None) -> ShardingStatistics:
    """Return what a sharded module and those below amount to; print it for a table.

    Parameters, bytes sharded, gathered and padded; collectives and host time per step since the
    model was built, or since ``reset_statistics()``.

    Args:
        module: a sharded module.
        slow_ranks: also report which ranks are slow, over the steps that it watched. The call
            is a collective then: every rank of the job makes it.

    Raises:
        TypeError: if ``module`` is not sharded, or ``slow_ranks`` is no ``SlowRanks``.
    """
    if not isinstance(slow_ranks, SlowRanks | None):
        raise TypeError(f"slow_ranks is {slow_ranks!r}; pass a SlowRanks, or None")
    steps = _state_of("statistics", module).context.backwards_ended
    report = None if slow_ranks is None else slow_ranks.report()
    groups = [
        _statistics_of(group, max(1, steps), 0 if index else state.host_ns)
        for state in the_states(module, recurse=True)
        for index, group in enumerate(state.own_groups)
    ]
    return ShardingStatistics(groups=tuple(groups), steps=steps, slow_ranks=report)


def reset_statistics(module: nn.Module) -> None:
    """Reset the counts of the root of ``module``, and of all below it: call it after the warm-up.

    Raises:
        TypeError: if ``module`` is not sharded.
    """
    context = _state_of("reset_statistics", module).context
    context.backwards_ended = 0
    for state in context.states:
        state.host_ns = 0
    for group in context.groups:
        group.gathering.gathers = 0
        group.gradients.reductions = 0


def _state_of(call: str, module: nn.Module) -> ModuleState:
    """Return the state of a sharded module, whose root is known."""
    if not isinstance(module, nn.Module) or state_of(module) is None:
        raise TypeError(
            f"{call}() got a {type(module).__name__}, expected a sharded module; call "
            "fully_shard on it before"
        )
    return initialised_state(module)


def _statistics_of(group: FSDPParamGroup, steps: int, host_ns: int) -> GroupStatistics:
    layout = group.gathering.layout
    gathered = sum(spec.numel * spec.dtype.itemsize for spec in layout.specs)
    return GroupStatistics(
        name=group.name,
        parameters=len(group.params),
        sharded_bytes=sum(param.shard.nbytes for param in group.params),
        gathered_bytes=gathered,
        padding_bytes=layout.buffer.slice_nbytes * layout.world_size - gathered,
        gathers=group.gathering.gathers / steps,
        reductions=group.gradients.reductions / steps,
        host_us=host_ns / steps / 1000,
    )

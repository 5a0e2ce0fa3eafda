"""Which rank makes the others wait: the own times of all ranks, compared.

Owns ``SlowRanks``, which keeps marks and exchanges what they amount to, ``compare_ranks``, which
judges, and the report. ``own_times`` makes times of marks.

[Note: no common clock] The rank that comes last to a collective is the one that the others wait
for; how long they do is not their own slowness. So each rank measures its own time: what passes
while it waits for no rank. Differences of durations need no clocks that agree.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median, median_low
from typing import Any, Self

import torch
import torch.distributed as dist

from fullshard.insight.own_times import OwnTimes, OwnTimesReader, Phase, Step
from fullshard.insight.timeline import Timeline
from fullshard.sharding.spi import device_type_of, objects_of_ranks

__all__ = ["LastRank", "SlowRank", "SlowRanks", "SlowRanksReport", "compare_ranks"]

_MARGIN = 0.01  # of a step: ranks that come to a collective so close together come at once
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """A rank that takes longer than the others in a phase.

    Attributes:
        rank: its number among the ranks compared.
        phase: in which its own time is longer.
        module: the module of that phase where most of it passes; "" if the phase has none.
        seconds: by how much, in the median step (of those with access to files in that phase).
        share: that, as a part of a step.
    """

    rank: int
    phase: Phase
    module: str
    seconds: float
    share: float

    def __str__(self) -> str:
        """One line."""
        where = f", in {self.module}" if self.module else ""
        return (
            f"rank {self.rank} is slow in {self.phase}: {1000 * self.seconds:.1f} ms a step more "
            f"than other ranks ({self.share:.0%} of a step){where}"
        )


@dataclass(frozen=True, kw_only=True)
class LastRank:
    """A collective to which one rank often came last.

    Attributes:
        collective: a gather or a reduction, and whose.
        rank: the rank that was last most often.
        times: in how many steps it was.
        seconds: by how much, in the median of these steps: what the other ranks waited longer.
    """

    collective: str
    rank: int
    times: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SlowRanksReport:
    """The own times of all ranks over the same steps. ``str()`` of it is a table.

    Attributes:
        ranks: numbers of the ranks.
        steps: numbers of the steps that all of them know.
        step_seconds: the median time of a step, waits included.
        own: by phase the seconds of each rank in the median step.
        by_step: by step the own seconds of each rank, access to files included.
        slow: ranks that are slow, the slowest first; empty if none is.
        last: collectives for which others waited, in order of their waits.
    """

    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    step_seconds: float
    own: Mapping[Phase, tuple[float, ...]]
    by_step: tuple[tuple[float, ...], ...]
    slow: tuple[SlowRank, ...]
    last: tuple[LastRank, ...]

    def value(self) -> dict[str, Any]:
        """Return the report as a JSON value."""
        return asdict(self)

    def __str__(self) -> str:
        """The slow ranks, own times by rank and phase, and who came last to which collective."""
        if not self.steps:
            return "slow ranks: no step that all ranks know is over"
        lines = [str(each) for each in self.slow] or ["no rank is slow"]
        lines += ["", f"own ms of the median of {len(self.steps)} steps"]
        lines[-1] += f" (a step takes {1000 * self.step_seconds:.1f} ms)"
        heads = [str(phase) for phase in Phase]
        lines.append("  ".join([f"{'rank':<6}", *(f"{head:>11}" for head in heads)]))
        for place, rank in enumerate(self.ranks):
            cells = [f"{1000 * self.own[phase][place]:>11.1f}" for phase in Phase]
            lines.append("  ".join([f"{rank:<6}", *cells]))
        if self.last:
            lines += ["", "came last, and the others waited:"]
            lines += [
                f"rank {each.rank} to the {each.collective}: {each.times} times, by "
                f"{1000 * each.seconds:.1f} ms"
                for each in self.last[:_SHOWN]
            ]
        return "\n".join(lines)


class SlowRanks:
    """Watches where this rank's time goes, and compares it with that of other ranks.

    As a context manager, or from ``start()`` to ``stop()``. It keeps time stamps in memory of a
    fixed size and communicates nothing, until ``report()``.

    Args:
        capacity: how many time stamps are kept, about 100 bytes each. A step has about ten for
            each group; steps that are no longer there are missing in a report.
        clock: the time in nanoseconds.
    """

    def __init__(
        self, *, capacity: int = 1 << 15, clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self._timeline = Timeline(capacity, clock)
        self._reader = OwnTimesReader()

    def start(self) -> Self:
        """Begin to watch, between steps."""
        self._timeline.start()
        self._reader.skip_to(self._timeline.clock())
        return self

    def stop(self) -> None:
        """Watch no more; ``report()`` still covers what was seen."""
        self._timeline.stop()

    def __enter__(self) -> Self:
        """Start."""
        return self.start()

    def __exit__(self, *error: object) -> None:
        """Stop."""
        self.stop()

    def own_times(self) -> OwnTimes:
        """Return this rank's steps since the last call, as far as they are kept; no other rank's.

        The next call does not return these steps again.
        """
        self._reader.read(self._timeline.take())
        return self._reader.steps()

    def report(
        self, process_group: dist.ProcessGroup | None = None, *, bar: float = 0.1
    ) -> SlowRanksReport:
        """Compare the steps since the last report. A collective call: every rank makes it.

        Args:
            process_group: the ranks to compare; None: all.
            bar: the part of a step by which a rank has to be slower to be named.

        Raises:
            ValueError: if ``bar`` is not between 0 and 1.
        """
        _check(bar)
        mine = self.own_times().value()
        group = process_group or dist.group.WORLD
        if group is None:  # this rank is alone
            everyone = [mine]
        else:
            everyone = objects_of_ranks(mine, group, torch.device(device_type_of(group)), None)
        self._reader.skip_to(self._timeline.clock())
        return compare_ranks(dict(enumerate(map(OwnTimes.of, everyone))), bar=bar)


def _check(bar: float) -> None:
    if not 0 < bar < 1:
        raise ValueError(f"bar is {bar}; pass a part of a step, between 0 and 1")


def compare_ranks(ranks: Mapping[int, OwnTimes], *, bar: float = 0.1) -> SlowRanksReport:
    """Compare ranks over the steps that all of them know.

    In each step, a rank is compared with the median of the others' own times, the lower of two. A
    rank is slow in a phase if it takes longer by ``bar`` of a step or more in three steps of four.
    Access to files is compared over the steps in which there is any.

    Args:
        ranks: their own times, by number.
        bar: the part of a step.
    """
    _check(bar)
    by_number = {rank: {s.number: s for s in own.steps} for rank, own in ranks.items()}
    common = set.intersection(*(set(steps) for steps in by_number.values())) if ranks else set()
    numbers = tuple(sorted(common))
    if not numbers:
        return SlowRanksReport(
            ranks=tuple(ranks), steps=(), step_seconds=0.0, own={}, by_step=(), slow=(), last=()
        )
    steps = {rank: [found[number] for number in numbers] for rank, found in by_number.items()}
    whole = median(step.seconds for each in steps.values() for step in each)
    phases = {
        phase: {rank: [step.phase(phase) for step in each] for rank, each in steps.items()}
        for phase in Phase
    }
    by_step = zip(*([sum(s.own.values()) for s in each] for each in steps.values()), strict=True)
    return SlowRanksReport(
        ranks=tuple(ranks),
        steps=numbers,
        step_seconds=whole,
        own={phase: tuple(map(median, own.values())) for phase, own in phases.items()},
        by_step=tuple(by_step),
        slow=tuple(_slow_ranks(phases, steps, whole, bar)),
        last=tuple(_last_ranks(steps, whole)),
    )


_Own = Mapping[int, Sequence[float]]
"""Seconds of each rank, by step."""


def _excess(own: _Own, rank: int) -> list[float]:
    """Return by how much the rank takes longer than the lower median of the others, by step."""
    others = [seconds for other, seconds in own.items() if other != rank]
    if not others:
        return [0.0] * len(own[rank])
    usual = [median_low(column) for column in zip(*others, strict=True)]
    return [mine - theirs for mine, theirs in zip(own[rank], usual, strict=True)]


def _slow_ranks(
    phases: Mapping[Phase, _Own], steps: Mapping[int, Sequence[Step]], whole: float, bar: float
) -> list[SlowRank]:
    found = []
    for phase, own in phases.items():
        for rank in own:
            excess = _excess(own, rank)
            if phase is Phase.FILES:
                used = [any(column) for column in zip(*own.values(), strict=True)]
                excess = [each for each, there in zip(excess, used, strict=True) if there]
            if not excess:
                continue
            seconds, lower = median(excess), sorted(excess)[len(excess) // 4]
            if whole and lower >= bar * whole:
                module = _module_of(phase, rank, steps)
                share = seconds / whole
                found.append(
                    SlowRank(rank=rank, phase=phase, module=module, seconds=seconds, share=share)
                )
    return sorted(found, key=lambda each: -each.seconds)


def _module_of(phase: Phase, rank: int, steps: Mapping[int, Sequence[Step]]) -> str:
    """Return the module in which the rank takes longest, compared with the others."""
    modules = dict.fromkeys(
        module for step in steps[rank] for each, module in step.own if each is phase
    )

    def excess(module: str) -> float:
        own = {r: [s.own.get((phase, module), 0.0) for s in each] for r, each in steps.items()}
        return sum(_excess(own, rank))

    return max(modules, key=excess, default="")


def _last_ranks(steps: Mapping[int, Sequence[Step]], whole: float) -> list[LastRank]:
    """Return for each collective the rank that waited least, and so came last.

    The other ranks waited longer than that rank, by as much as it came later.
    """
    names = dict.fromkeys(name for each in steps.values() for step in each for name in step.waits)
    found = []
    for name in names:
        margins: dict[int, list[float]] = {}
        for column in zip(*steps.values(), strict=True):
            waits = {
                rank: step.waits[name]
                for rank, step in zip(steps, column, strict=True)
                if name in step.waits
            }
            if len(waits) < 2:
                continue
            last = min(waits, key=lambda rank: waits[rank])
            margin = median_low(t for r, t in waits.items() if r != last) - waits[last]
            if margin > _MARGIN * whole:
                margins.setdefault(last, []).append(margin)
        if margins:
            times = Counter({rank: len(each) for rank, each in margins.items()})
            rank, count = times.most_common(1)[0]
            seconds = median(margins[rank])
            found.append(LastRank(collective=name, rank=rank, times=count, seconds=seconds))
    return sorted(found, key=lambda each: -each.times * each.seconds)

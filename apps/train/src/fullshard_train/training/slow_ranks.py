"""`run.slow_ranks`: which rank the others wait for, looked at every so many steps.

Owns when ranks compare their own times, the line that is printed when other ranks than before are
slow, and the record of kind "ranks": for each phase `<phase>_slowest_rank`, and `<phase>_excess_ms`
by which that rank takes longer than the median of the others. `fullshard.insight.SlowRanks`
measures and judges.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median_low

from fullshard.insight import Phase, SlowRanks, SlowRanksReport
from fullshard_train.ranks.distributed import World
from fullshard_train.reporting.metrics import MetricsSink

__all__ = ["RankWatch", "watch_ranks"]


class RankWatch:
    """Compares the ranks after every so many steps.

    Args:
        every: how many; 0: never.
        world: the ranks.
        metrics: where the records go.
        watch: what measures.
    """

    def __init__(self, every: int, world: World, metrics: MetricsSink, watch: SlowRanks) -> None:
        self._every = every if world.size > 1 else 0
        self._world = world
        self._metrics = metrics
        self._watch = watch
        self._told: set[tuple[int, Phase]] = set()

    def after(self, step: int) -> None:
        """Compare, if it is time; every rank calls this after each step."""
        if not self._every or step % self._every:
            return
        report = self._watch.report()
        if not report.steps:
            return
        self._metrics.write(_record(report, step))
        found = {(each.rank, each.phase) for each in report.slow}
        if found - self._told and self._world.is_main:
            for each in report.slow:
                print(f"step {step}: {each}", flush=True)
        self._told = found


@contextmanager
def watch_ranks(every: int, world: World, metrics: MetricsSink) -> Iterator[RankWatch]:
    """A context in which the ranks are watched; `every` 0 watches nothing."""
    watch = SlowRanks()
    ranks = RankWatch(every, world, metrics, watch)
    if not every or world.size == 1:
        yield ranks
        return
    with watch:
        yield ranks


def _record(report: SlowRanksReport, step: int) -> dict[str, str | int | float]:
    """A flat record: loggers draw a curve for each number."""
    record: dict[str, str | int | float] = {"kind": "ranks", "step": step}
    record["step_ms"] = round(1000 * report.step_seconds, 3)
    for phase, own in report.own.items():
        slowest = max(range(len(own)), key=own.__getitem__)
        others = [seconds for rank, seconds in enumerate(own) if rank != slowest]
        name = str(phase).replace(" ", "_")
        record[f"{name}_slowest_rank"] = report.ranks[slowest]
        record[f"{name}_excess_ms"] = round(1000 * (own[slowest] - median_low(others)), 3)
    return record

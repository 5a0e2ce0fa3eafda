"""One observed step: bytes copied outside collectives, and the collectives.

Owns putting together what the dispatcher saw and what fullshard itself reports, since a transport
of fullshard's own reaches no dispatcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm import EventKind, observe
from fullshard.insight import StatisticsObserver
from fullshard_bench.contestants.training import Trainee
from fullshard_bench.launching.arena import Arena
from fullshard_bench.launching.network import bytes_sent
from fullshard_bench.launching.ranks import Ranks
from fullshard_bench.launching.silent import SILENT, listening
from fullshard_bench.measuring.counting import Collectives, StepCounter
from fullshard_bench.records.result import Traffic

__all__ = ["StepCounts", "count_left", "count_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Counts of one step on this rank."""

    copied_bytes: int
    collectives: dict[str, Traffic]


def count_step(trainee: Trainee, batch: Sequence[torch.Tensor], arena: Arena) -> StepCounts:
    """Train on `batch` and counts."""
    counter = StepCounter(silent=dist.get_backend(arena.group) == SILENT)
    counter.mark(trainee.held())

    def mark_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            counter.mark([each.grad for each in group["params"] if each.grad is not None])

    handle = trainee.optimizer.register_step_pre_hook(mark_gradients)
    observer = StatisticsObserver()
    with observe(observer), counter, listening(counter.on_silent):
        trainee.step(batch)
    handle.remove()
    seen = counter.collectives
    own = _own_transport(seen, observer, arena)
    collectives = {
        kind: _traffic(own if kind in own.counts else seen, kind)
        for kind in sorted({*seen.counts, *own.counts})
    }
    return StepCounts(
        copied_bytes=counter.copied_bytes(allowed=sum(own.nbytes.values())),
        collectives=collectives,
    )


def count_left(trainee: Trainee, batch: Sequence[torch.Tensor], ranks: Ranks) -> int:
    """Train on `batch`; bytes that left this host over its link in that step, -1 without one.

    The message by which ranks meet is counted in.
    """
    ranks.meet()
    before = bytes_sent()
    ranks.meet()  # no rank sends before all ranks have looked
    trainee.step(batch)
    ranks.meet()
    after = bytes_sent()
    return -1 if before is None or after is None else after - before


def _own_transport(seen: Collectives, observer: StatisticsObserver, arena: Arena) -> Collectives:
    """Collectives that fullshard reports and that no dispatcher saw: a transport of its own."""
    own = Collectives()
    shards = arena.mesh.size(arena.mesh.ndim - 1)
    reported = observer.statistics()
    for kind in (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE):
        done = seen.counts.get(kind.value, 0)
        if kind is EventKind.REDUCE_SCATTER:  # between hosts, as an exchange
            done += seen.counts.get("all_to_all", 0)
        if reported.counts[kind] > done:
            own.add(kind.value, reported.nbytes[kind], shards, reported.counts[kind])
    return own


def _traffic(collectives: Collectives, kind: str) -> Traffic:
    return Traffic(count=collectives.counts[kind], nbytes=collectives.nbytes[kind])

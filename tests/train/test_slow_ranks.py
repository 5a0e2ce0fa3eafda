"""The trainer names slow ranks, in its output and in the metrics."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from typing import Any

import pytest
import torch.distributed as dist

from fullshard.comm.spi import WATCHERS
from fullshard.insight import Phase, SlowRanks
from fullshard_train.ranks.distributed import World
from fullshard_train.training.slow_ranks import RankWatch, watch_ranks
from support.ranks import distributed
from support.slow_ranks import Clock, build, train


class Kept:
    """A sink that keeps its records."""

    def __init__(self) -> None:
        self.records: list[Mapping[str, Any]] = []

    def write(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


@distributed(2)
def test_a_slow_rank_is_printed_once_and_recorded_each_time() -> None:
    rank, clock, kept = dist.get_rank(), Clock(), Kept()

    def delay(phase: Phase, module: str) -> None:
        clock.pass_ms(20 if (phase, rank) == (Phase.INPUT, 1) else 10)

    world = World(rank=rank, size=2, local_rank=rank, local_size=2)
    net, printed = build(delay), io.StringIO()
    with SlowRanks(clock=clock) as watch, contextlib.redirect_stdout(printed):
        ranks = RankWatch(2, world, kept, watch)
        for step in range(1, 6):
            train(net, delay, 1)
            ranks.after(step)
    assert [record["step"] for record in kept.records] == [2, 4]
    for record in kept.records:
        assert record["kind"] == "ranks"
        assert record["input_slowest_rank"] == 1
        assert record["input_excess_ms"] == pytest.approx(10)
        assert record["file_system_excess_ms"] == 0
    line = "step 2: rank 1 is slow in input: 10.0 ms a step more than other ranks (12% of a step)\n"
    assert printed.getvalue() == (line if rank == 0 else "")


def test_nothing_is_watched_with_0_or_on_one_rank() -> None:
    kept = Kept()
    for every, size in ((0, 2), (5, 1)):
        world = World(rank=0, size=size, local_rank=0, local_size=size)
        with watch_ranks(every, world, kept) as ranks:
            assert not WATCHERS
            ranks.after(5)
    assert kept.records == []

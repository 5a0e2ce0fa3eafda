"""Events are counted by kind."""

from __future__ import annotations

from fullshard.comm import EventKind, observe
from fullshard.comm.runtime.observer import emit
from fullshard.insight import StatisticsObserver


def test_statistics_count_events_and_bytes_of_every_kind() -> None:
    counts = StatisticsObserver()
    with observe(counts):
        emit(EventKind.ALL_GATHER, nbytes=10)
        emit(EventKind.ALL_GATHER, nbytes=5)
        emit(EventKind.RESHARD)
    statistics = counts.statistics()
    assert statistics.counts[EventKind.ALL_GATHER] == 2
    assert statistics.nbytes[EventKind.ALL_GATHER] == 15
    assert statistics.counts[EventKind.REDUCE_SCATTER] == 0
    assert sum(statistics.counts.values()) == 3
    lines = [line.split() for line in str(statistics).splitlines()]
    assert lines == [["event", "count", "bytes"], ["reshard", "1", "0"], ["all_gather", "2", "15"]]

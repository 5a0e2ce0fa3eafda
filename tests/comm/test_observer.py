"""Events reach who listens, in order, and nobody who listens can break what is watched."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from fullshard.comm import (
    CollectiveMismatchError,
    Event,
    EventKind,
    EventLog,
    Layout,
    TensorSpec,
    default_reduce_scatter,
    foreach_reduce,
    observe,
    reduction_scaling,
)
from fullshard.comm.runtime import observer
from fullshard.comm.runtime.observer import LISTENERS, Launch, emit
from support.collectives import reduce_config
from support.ranks import distributed, world


def test_events_reach_every_observer_in_order_while_it_listens() -> None:
    outer, inner = EventLog(), EventLog()
    emit(EventKind.RESHARD, "before")
    with observe(outer):
        emit(EventKind.UNSHARD, "a", rank=1)
        with observe(inner):
            emit(EventKind.ALL_GATHER, "a", rank=1, nbytes=64, stream="gather")
        emit(EventKind.WAIT, "a")
    emit(EventKind.RESHARD, "after")
    assert outer.kinds() == [EventKind.UNSHARD, EventKind.ALL_GATHER, EventKind.WAIT]
    assert inner.kinds() == [EventKind.ALL_GATHER]
    (event,) = inner.events
    assert (event.name, event.rank, event.nbytes, event.stream) == ("a", 1, 64, "gather")
    times = [each.time_ns for each in outer.events]
    assert times == sorted(times)
    assert all(times)


def test_a_log_can_be_filtered_and_emptied() -> None:
    log = EventLog()
    for kind, name in [(EventKind.UNSHARD, "a"), (EventKind.WAIT, "a"), (EventKind.UNSHARD, "b")]:
        log.on_event(Event(kind=kind, name=name))
    assert log.named(EventKind.UNSHARD) == ["a", "b"]
    assert [event.kind for event in log.of(EventKind.WAIT)] == [EventKind.WAIT]
    log.clear()
    assert log.kinds() == []


def test_emitting_reads_no_clock_and_makes_nothing_when_nobody_listens() -> None:
    assert not LISTENERS
    with patch.object(time, "perf_counter_ns", side_effect=AssertionError("the clock was read")):
        emit(EventKind.UNSHARD, "a")
        with observe(EventLog()), pytest.raises(AssertionError, match="the clock was read"):
            emit(EventKind.UNSHARD, "a")
    emit(EventKind.UNSHARD, "a")
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(1000):
            emit(EventKind.UNSHARD, "a")
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1000  # less than a byte for each call


class _Broken:
    def __init__(self) -> None:
        self.calls = 0

    def on_event(self, event: Event) -> None:
        self.calls += 1
        raise RuntimeError("no space left")


def test_an_observer_that_raises_breaks_nothing_and_is_reported_once_afterwards() -> None:
    log, broken = EventLog(), _Broken()
    finished = False
    with (
        pytest.warns(RuntimeWarning, match=r"_Broken raised RuntimeError.*no space left") as seen,
        observe(broken),
        observe(log),
    ):
        emit(EventKind.ALL_GATHER, "a")
        emit(EventKind.ALL_GATHER, "b")
        assert not seen.list  # a filter could have turned a warning into an exception here
        finished = True
    assert finished
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert broken.calls == 1
    assert log.named(EventKind.ALL_GATHER) == ["a", "b"]


def test_an_observer_is_removed_when_its_context_raises() -> None:
    with pytest.raises(KeyError), observe(EventLog()):
        raise KeyError
    assert not LISTENERS


def test_an_observer_may_be_registered_twice_and_leaves_once_each_time() -> None:
    log = EventLog()
    with observe(log):
        with observe(log):
            emit(EventKind.WAIT)
        emit(EventKind.WAIT)
    assert len(log.events) == 3


def test_what_cannot_observe_is_refused() -> None:
    message = r"object, which is no Observer: .* on_event\(event\)"
    with pytest.raises(TypeError, match=message), observe(object()):  # type: ignore[arg-type]
        pass


@distributed(2)
def test_a_check_sees_a_reduction_before_its_launch_and_may_prevent_it() -> None:
    group, given = world(), torch.ones(4)
    scaling = reduction_scaling(2, torch.float32, averages=False)
    config = reduce_config(group, default_reduce_scatter(group), scaling, name="layers.0")
    layout = Layout([TensorSpec(shape=(4,), dtype=torch.float32)], 2)
    seen: list[Launch] = []
    log = EventLog()

    def check(launch: Launch, ranks: dist.ProcessGroup, gradients: Any) -> None:
        assert (ranks is group, gradients[0] is given, log.events) == (True, True, [])
        seen.append(launch)
        if len(seen) == 1:
            raise CollectiveMismatchError(f"not {launch.name}")

    observer.CHECKS.append(check)  # a name of the test's module would be a copy
    try:
        with observe(log):
            with pytest.raises(CollectiveMismatchError, match=r"not layers\.0"):
                foreach_reduce([given], layout, config)
            (shard,) = foreach_reduce([given], layout, config).wait().shards
    finally:
        observer.CHECKS.remove(check)
    assert torch.equal(shard, torch.ones(2))
    detail = "float32, sum scaled by 1 before and 0.5 after"
    nbytes = layout.buffer.slice_nbytes * 2
    launch = Launch(kind="reduce_scatter", name="layers.0", nbytes=nbytes, detail=detail)
    assert seen == [launch] * 2

"""Streams: nothing on CPU; on an accelerator, who waits for whom and who keeps what alive.

The accelerator is a stand-in that writes down every wait, so the orders are checked without one.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from comm.stand_ins import ACCELERATOR, CPU, stand_in_accelerator
from fullshard.comm import CommStreams
from fullshard.comm.runtime.streams import NullEvent, NullStream, canonical_device


@pytest.fixture
def streams() -> Iterator[Any]:
    with stand_in_accelerator() as (_, streams):
        yield streams


def test_on_cpu_every_stream_is_a_null_object_and_overlap_comes_from_work_handles() -> None:
    streams = CommStreams(torch.device("cpu", 0))
    assert streams.asynchronous_work
    assert streams.device == CPU
    for stream in (streams.copy_in, streams.gather, streams.reduce, streams.all_reduce):
        assert isinstance(stream, NullStream)
        with streams.use(stream):
            event = streams.record(stream)
        assert isinstance(event, NullEvent)
        event.synchronize()
        stream.wait_event(event)
    streams.synchronize_with_current()


def test_on_cpu_retired_buffers_are_not_kept() -> None:
    streams = CommStreams(CPU)
    buffer = torch.zeros(4)
    gone = weakref.ref(buffer)
    streams.retire(buffer, streams.copy_in, streams.record(), keep=1)
    del buffer
    gc.collect()
    assert gone() is None
    assert streams.retired == 0
    streams.collect_all()


def test_on_an_accelerator_the_streams_are_different_and_of_high_priority(
    streams: Any,
) -> None:
    named = (streams.copy_in, streams.gather, streams.inputs, streams.reduce, streams.all_reduce)
    assert len(set(map(id, named))) == 5
    assert all(stream.priority < 0 and stream.device == ACCELERATOR for stream in named)
    assert not streams.asynchronous_work


def test_use_makes_a_stream_current_and_record_takes_the_current_one(streams: Any) -> None:
    outside = streams.current()
    with streams.use(streams.gather):
        assert streams.current() is streams.gather
        assert streams.record().stream is streams.gather
    assert streams.current() is outside
    assert streams.record(streams.reduce).stream is streams.reduce


def test_a_retired_buffer_goes_once_its_owner_waits_for_the_last_use(streams: Any) -> None:
    buffer = torch.zeros(4)
    gone = weakref.ref(buffer)
    used = streams.record()
    streams.retire(buffer, streams.copy_in, used)
    del buffer
    gc.collect()
    assert gone() is None
    assert streams.copy_in.waited == [used]
    assert streams.reduce.waited == []


def test_the_newest_buffers_can_be_held_back_until_all_are_collected(streams: Any) -> None:
    events = [streams.record() for _ in range(3)]
    for event in events:
        streams.retire(torch.zeros(1), streams.inputs, event, keep=1)
    streams.retire(torch.zeros(1), streams.copy_in, streams.record())  # another owner
    assert streams.inputs.waited == events[:2]
    assert streams.retired == 1
    streams.collect_all()
    assert streams.inputs.waited == events
    assert streams.retired == 0


def test_copy_in_and_gather_wait_for_the_current_stream_before_a_root_forward(
    streams: Any,
) -> None:
    streams.synchronize_with_current()
    for stream in (streams.copy_in, streams.gather):
        (event,) = stream.waited
        assert event.stream is streams.current()
    assert streams.reduce.waited == []


def test_a_device_is_named_as_its_tensors_name_it() -> None:
    assert canonical_device(torch.device("cpu", 0)) == torch.zeros(1).device
    assert canonical_device(torch.device("meta")) == torch.device("meta")
    assert canonical_device(ACCELERATOR) == ACCELERATOR
    with stand_in_accelerator():
        assert canonical_device(torch.device("cuda")) == torch.device("cuda", 3)

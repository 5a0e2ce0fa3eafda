"""What a device can is asked of its module, and one queue without streams is enough."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fullshard.comm import CommStreams
from fullshard.comm.runtime import devices
from fullshard.comm.runtime.devices import can_pin, simulated, traits_of
from fullshard.comm.runtime.streams import NullStream

DEVICE = torch.device("xpu", 0)  # no test machine has one
STREAMS = {"Stream": object, "current_stream": object, "stream": object}


@pytest.fixture(autouse=True)
def _ask_anew() -> Iterator[None]:
    """Let each test ask the module, and leave what others found."""
    with patch.dict(devices._TRAITS), patch.dict(devices._pins):
        devices._TRAITS.pop(DEVICE.type, None)
        devices._pins.clear()
        yield


def _module(**names: Any) -> Any:
    module = SimpleNamespace(current_device=lambda: 0, **names)
    return patch.object(torch, "get_device_module", lambda device: module)


@pytest.mark.parametrize("missing", [None, *STREAMS])
def test_a_device_has_streams_if_its_module_can_make_and_use_them(missing: str | None) -> None:
    with _module(**{name: value for name, value in STREAMS.items() if name != missing}):
        traits = traits_of(DEVICE)
    assert traits.streams is (missing is None)
    assert traits.queued
    assert not traits.shared_memory


def test_a_device_with_one_queue_gets_streams_that_do_nothing() -> None:
    with _module():
        streams = CommStreams(DEVICE)
        assert isinstance(streams.gather, NullStream)
        assert isinstance(streams.current(), NullStream)
        streams.synchronize_with_current()
        streams.gather.wait_event(streams.record())
        with streams.use(streams.reduce):
            streams.retire(torch.ones(1), streams.copy_in, streams.record())
    assert streams.asynchronous_work
    assert streams.retired == 0


@pytest.mark.parametrize(("error", "has"), [(TypeError, False), (RuntimeError, True), (None, True)])
def test_a_device_has_float64_unless_it_refuses_the_dtype(error: Any, has: bool) -> None:
    def zeros(*_: Any, **__: Any) -> None:
        if error is not None:
            raise error("as planned")

    with _module(), patch.object(torch, "zeros", zeros):
        assert traits_of(DEVICE).float64 is has


def test_the_host_has_no_queue_and_ranks_share_its_memory() -> None:
    traits = traits_of(torch.device("cpu"))
    assert not traits.queued
    assert not traits.streams
    assert traits.shared_memory


def test_what_is_simulated_ends_with_its_block() -> None:
    with _module():
        before = traits_of(DEVICE)
        with simulated(DEVICE.type, traits_of(torch.device("cpu"))):
            assert not traits_of(DEVICE).queued
        assert traits_of(DEVICE) == before


@pytest.mark.parametrize("pins", [True, False])
def test_memory_can_be_pinned_if_the_accelerator_can(pins: bool) -> None:
    def empty(*_: Any, pin_memory: bool) -> Any:
        assert pin_memory
        if not pins:
            raise RuntimeError("as planned")
        return SimpleNamespace(is_pinned=lambda: True)

    accelerator = patch.object(torch.accelerator, "current_accelerator", lambda **_: DEVICE)
    with accelerator, patch.object(torch, "empty", empty):
        assert can_pin(torch.device("cpu")) is pins
        assert not can_pin(torch.device("meta"))

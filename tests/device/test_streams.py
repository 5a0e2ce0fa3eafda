"""Streams of the asynchronous device: work runs late and in order; waits order two streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from fullshard.comm import CommStreams
from support.card import CARD, card
from support.device.pace import Pace, paced

pytestmark = pytest.mark.device

LAZY = Pace(held=1.0)
UNTIL_READ = Pace(quiet_ms=60_000)  # what waits for nothing stays late while the host is slow


def _filled_late(value: float) -> torch.Tensor:
    """A tensor that a busy stream fills with a value, after it held zeros for everybody."""
    made = torch.zeros(1000, device=CARD)
    card.synchronize()
    card._sleep(1)
    made.fill_(value)
    return made


def test_a_read_without_a_wait_sees_what_was_there_before() -> None:
    with paced(UNTIL_READ):
        made, side = _filled_late(3), card.Stream()
        with card.stream(side):
            read = made + 1
        side.synchronize()
        assert read.tolist() == [1.0] * 1000
        assert made.tolist() == [3.0] * 1000


def test_a_write_without_a_wait_comes_before_an_earlier_read() -> None:
    with paced(UNTIL_READ):
        made, side = torch.ones(10, device=CARD), card.Stream()
        card.synchronize()
        card._sleep(1)
        read = made + 1
        with card.stream(side):
            made.fill_(7)
        side.synchronize()
        assert read.tolist() == [8.0] * 10


def _wait_event(side: Any) -> None:
    side.wait_event(card.current_stream().record_event())


def _wait_stream(side: Any) -> None:
    side.wait_stream(card.current_stream())


def _event_wait(side: Any) -> None:
    event = card.Event()
    event.record()
    event.wait(side)


@pytest.mark.parametrize(
    "wait",
    [
        _wait_event,
        _wait_stream,
        _event_wait,
        lambda side: card.current_stream().synchronize(),
        lambda side: card.current_stream().record_event().synchronize(),
        lambda side: card.synchronize(),
        lambda side: torch.accelerator.synchronize(),
    ],
)
@pytest.mark.parametrize("pace", [Pace(), LAZY, Pace(seed=1, held=0.5, delay_us=50)])
def test_each_way_to_wait_orders(wait: Callable[[Any], None], pace: Pace) -> None:
    with paced(pace):
        made, side = _filled_late(3), card.Stream()
        wait(side)
        with card.stream(side):
            read = made + 1
        side.synchronize()
        assert read.tolist() == [4.0] * 1000


def test_the_host_goes_on_while_a_stream_is_busy_and_a_query_lets_it_end() -> None:
    _filled_late(1)
    event = card.current_stream().record_event()
    assert not event.query()
    while not event.query():
        pass
    assert card.current_stream().query()


@pytest.mark.parametrize("read", ["item", "tolist", "cpu", "__bool__"])
def test_the_host_waits_where_it_reads(read: str) -> None:
    made = torch.zeros((), device=CARD)
    card._sleep(1)
    made += 1
    found = getattr(made, read)()
    assert found == 1


def test_held_work_runs_when_the_host_does_nothing() -> None:
    with paced(Pace(held=1.0, quiet_ms=1)):
        torch.ones(3, device=CARD)
        event = card.current_stream().record_event()
        while not event.query():
            pass


def test_under_a_seed_work_comes_too_late_for_a_stream_that_does_not_wait() -> None:
    assert _read_without_waits(seed=1) != list(range(100))


def _read_without_waits(seed: int) -> list[float]:
    """What a stream reads of what another is about to write; -1 stands for NaN."""
    results = []
    with paced(Pace(seed=seed, held=0.5, quiet_ms=60_000)):
        side = card.Stream()
        for number in range(100):
            value = torch.full((4,), float(number), device=CARD)
            with card.stream(side):
                results.append(value + 0)
            side.synchronize()
    return torch.stack([each[0] for each in results]).nan_to_num(-1).tolist()


def test_two_devices_have_streams_of_their_own() -> None:
    other = torch.device(CARD.type, 1)
    card._sleep(1)
    made = torch.full((5,), 2.0, device=CARD)
    moved = made.to(other)  # waits for the first device's stream, as a copy between cards does
    with card.device(1):
        assert card.current_device() == 1
        assert card.current_stream().device == other
        doubled = moved * 2
    assert card.current_device() == 0
    assert doubled.device == other
    assert doubled.tolist() == [4.0] * 5
    with pytest.raises(RuntimeError, match="same device"):
        made + moved


def test_the_streams_of_another_device_leave_the_current_device_and_its_stream_alone() -> None:
    other = torch.device(CARD.type, 1)
    streams = CommStreams(other)
    before = card.current_stream(CARD), card.current_stream(other)
    with streams.use(streams.gather):
        assert streams.current() == card.current_stream(other) == streams.gather
    assert torch.accelerator.current_device_index() == CARD.index
    assert (card.current_stream(CARD), card.current_stream(other)) == before


@pytest.mark.parametrize("known", [CARD.type, "meta"])
def test_torchs_accelerator_is_asked_only_about_its_own_type_of_device(known: str) -> None:
    accelerator = torch.device(known)
    with patch.object(torch.accelerator, "current_accelerator", return_value=accelerator):
        streams = CommStreams(CARD)
    with patch.object(card, "stream", wraps=card.stream) as asked, streams.use(streams.gather):
        assert card.current_stream() == streams.gather
    assert asked.called is (known == "meta")


def test_streams_are_equal_by_what_they_are() -> None:
    first, second = card.Stream(), card.Stream(priority=-1)
    assert first != second
    assert first == first and hash(first) == hash(first)
    with card.stream(first):
        assert card.current_stream() == first
        with card.stream(None):
            assert card.current_stream() == first
    assert card.current_stream() == card.default_stream()


def test_elapsed_time_is_known_of_timed_events() -> None:
    first, last = card.Event(enable_timing=True), card.Event(enable_timing=True)
    first.record()
    torch.ones(100, 100, device=CARD) @ torch.ones(100, 100, device=CARD)
    last.record()
    last.synchronize()
    assert first.elapsed_time(last) >= 0


@pytest.mark.parametrize("pace", [LAZY, Pace(seed=3, held=0.5, delay_us=50)])
def test_a_backward_runs_on_the_streams_of_its_forward(pace: Pace) -> None:
    with paced(pace):
        side, weight = card.Stream(), nn.Parameter(torch.ones(4, 4, device=CARD))
        side.wait_stream(card.current_stream())
        seen = []
        with card.stream(side):
            hidden = (weight * 2).exp()
            hidden.register_hook(lambda grad: seen.append(card.current_stream()))
        card.current_stream().wait_stream(side)
        (hidden * 3).sum().backward()
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad.cpu(), 6 * torch.full((4, 4), 2.0).exp())
        assert seen == [side]
        side.wait_stream(card.current_stream())  # its memory is the side stream's
        del hidden


def test_an_error_of_a_kernel_comes_where_the_host_waits() -> None:
    rows = nn.Embedding(3, 2).to(CARD)
    rows(torch.tensor([7], device=CARD))
    with pytest.raises(IndexError):
        card.synchronize()
    card.synchronize()  # it was raised once


def test_a_host_that_waits_can_be_noticed() -> None:
    value = torch.ones((), device=CARD)
    card.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            value.item()
        value.add_(1)
    finally:
        card.set_sync_debug_mode("default")
    assert value.item() == 2

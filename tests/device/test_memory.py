"""Memory of the asynchronous device: who may use a block when, and what is counted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from support.card import CARD, card

pytestmark = pytest.mark.device

N = 1000
BYTES = 4096  # of N floats, rounded to 512


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    card.synchronize()
    card.empty_cache()
    card.reset_peak_memory_stats()
    yield


def test_a_freed_block_goes_to_the_next_tensor_of_its_stream_at_once() -> None:
    card._sleep(1)  # nothing has run yet when the second one is made
    first = torch.ones(N, device=CARD)
    address = first.data_ptr()
    total = first.sum()
    del first
    second = torch.full((N,), 2.0, device=CARD)
    assert second.data_ptr() == address
    assert (total.item(), second.sum().item()) == (N, 2 * N)


def test_a_stream_that_nobody_waits_for_reads_nan_from_memory_that_was_given_out_again() -> None:
    made, side = torch.ones(N, device=CARD), card.Stream()
    side.wait_stream(card.current_stream())
    with card.stream(side):
        card._sleep(1)
        read = made + 1
    del made
    torch.empty(N, device=CARD)  # the same block
    card.synchronize()
    assert read.isnan().all().item()


def test_a_stream_that_uses_memory_before_its_allocation_loses_what_it_wrote() -> None:
    torch.ones(N, device=CARD)  # leaves a block behind
    side = card.Stream()
    card._sleep(1)
    torch.ones(N, device=CARD)  # and frees it once more, late
    made = torch.empty(N, device=CARD)
    with card.stream(side):
        made.fill_(3)
    side.synchronize()
    assert made.isnan().all().item()


def test_new_memory_is_nan() -> None:
    assert torch.empty(N, device=CARD).isnan().all().item()


def test_memory_recorded_on_a_stream_is_kept_until_that_is_done() -> None:
    made, side = torch.ones(N, device=CARD), card.Stream()
    side.wait_stream(card.current_stream())
    with card.stream(side):
        card._sleep(1)
        read = made + 1
    made.record_stream(side)
    del made
    card.current_stream().synchronize()
    side.synchronize()
    assert read.eq(2).all().item()


def test_bytes_are_counted_as_cuda_counts_them() -> None:
    before = card.memory_allocated()
    first = torch.empty(N, device=CARD)
    second = torch.empty(N, device=CARD)
    assert card.memory_allocated() - before == 2 * BYTES
    del first
    assert card.memory_allocated() - before == BYTES
    assert card.max_memory_allocated() - before == 2 * BYTES
    assert card.memory_reserved() >= card.memory_allocated() + BYTES
    card.reset_peak_memory_stats()
    assert card.max_memory_allocated() == card.memory_allocated()
    card.empty_cache()
    assert card.memory_reserved() == card.memory_allocated()
    assert card.memory_stats()["allocated_bytes.all.current"] == card.memory_allocated()
    assert torch.accelerator.memory_allocated() == card.memory_allocated()
    del second
    assert card.memory_allocated() == before


def test_a_storage_is_resized_to_nothing_and_back() -> None:
    made = torch.arange(N, device=CARD, dtype=torch.float32)
    before = card.memory_allocated()
    made.untyped_storage().resize_(0)
    assert card.memory_allocated() == before - BYTES
    made.untyped_storage().resize_(4 * N)
    assert card.memory_allocated() == before
    assert made.isnan().all().item()
    small = torch.ones(4, device=CARD)
    small.resize_(4, N)
    assert small[0, :4].tolist() == [1.0] * 4


# -- memory of the host ---------------------------------------------------------------------------


def test_pinned_memory_is_known() -> None:
    pinned = torch.ones(N).pin_memory()
    assert pinned.is_pinned() and pinned[3:].is_pinned()
    assert not torch.ones(N).is_pinned()
    assert torch.ones(N, device=CARD).to("cpu", non_blocking=True).is_pinned()


def test_a_copy_to_pinned_memory_runs_late_and_one_to_other_memory_waits() -> None:
    made = torch.ones(N, device=CARD)
    pinned, other = torch.zeros(N).pin_memory(), torch.zeros(N)
    card._sleep(1)
    pinned.copy_(made, non_blocking=True)
    assert pinned.sum().item() == 0
    other.copy_(made, non_blocking=True)
    assert (pinned.sum().item(), other.sum().item()) == (N, N)


def test_a_copy_from_pinned_memory_reads_late_and_one_from_other_memory_at_once() -> None:
    pinned, other = torch.ones(N).pin_memory(), torch.ones(N)
    card._sleep(1)
    late = pinned.to(CARD, non_blocking=True)
    early = other.to(CARD, non_blocking=True)
    pinned.fill_(5), other.fill_(5)
    assert (late.sum().item(), early.sum().item()) == (5 * N, N)
    card._sleep(1)
    assert pinned.to(CARD).sum().item() == 5 * N


def test_pinned_memory_in_use_is_not_given_out_again() -> None:
    pinned = torch.ones(N).pin_memory()
    address = pinned.data_ptr()
    card._sleep(1)
    late = pinned.to(CARD, non_blocking=True)
    del pinned
    other = torch.empty(N, pin_memory=True)
    assert other.data_ptr() != address
    assert late.sum().item() == N

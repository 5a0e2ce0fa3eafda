"""Gradients reduced from where they lie, against packing them first."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fullshard.comm import Layout, ReduceScaling, TensorSpec
from fullshard.comm.transports.contribution import Contribution
from fullshard.comm.transports.rank_order import reduce_in_rank_order

SUM = dist.ReduceOp.SUM


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, list[list[torch.Tensor | None]]]:
    """A layout, and every rank's gradients; some large enough to be added where they lie."""
    world = draw(st.integers(2, 5))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    specs = []
    for _ in range(draw(st.integers(1, 4))):
        shape = draw(st.sampled_from([(), (3,), (5, 4), (4, 6), (90 * world, 101), (7, 0)]))
        dim = draw(st.integers(0, max(len(shape) - 1, 0)))
        specs.append(TensorSpec(shape=shape, dtype=dtype, dim=dim))
    layout = Layout(specs, world, mask_numel=len(specs))
    seed = draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)
    gradients: list[list[torch.Tensor | None]] = []
    for _ in range(world):
        mine: list[torch.Tensor | None] = []
        for spec in specs:
            kind = draw(st.sampled_from(["dense", "transposed", "wide", "none"]))
            full = torch.randn(spec.shape, generator=generator).to(spec.dtype)
            if kind == "transposed" and full.ndim == 2:
                full = full.t().contiguous().t()
            mine.append(None if kind == "none" else full.float() if kind == "wide" else full)
        gradients.append(mine)
    return layout, gradients


def contributions(
    layout: Layout, gradients: list[list[torch.Tensor | None]], scaling: ReduceScaling
) -> list[Contribution]:
    return [Contribution(each, layout, rank, scaling) for rank, each in enumerate(gradients)]


def packed(given: Contribution, layout: Layout, ranks: range) -> torch.Tensor:
    buffer = torch.full((len(ranks) * layout.buffer.slice_numel,), torch.nan)
    buffer = buffer.to(layout.buffer.dtype)
    given.write(buffer, ranks)
    return buffer.view(len(ranks), -1)


@given(cases())
def test_what_is_written_for_some_ranks_is_their_part_of_what_is_written_for_all(
    case: tuple[Layout, list[list[torch.Tensor | None]]],
) -> None:
    layout, gradients = case
    scaling = ReduceScaling(op=SUM, pre=0.5, post=1.0, used=1.0)
    for given_ in contributions(layout, gradients, scaling):
        whole = packed(given_, layout, range(layout.world_size))
        assert not whole.isnan().any(), "everything is written, gaps included"
        for first in range(layout.world_size):
            for end in range(first + 1, layout.world_size + 1):
                part = packed(given_, layout, range(first, end))
                assert torch.equal(part, whole[first:end])


@given(cases())
def test_the_result_is_that_of_packed_slices_in_rank_order_to_the_bit(
    case: tuple[Layout, list[list[torch.Tensor | None]]],
) -> None:
    layout, gradients = case
    scaling = ReduceScaling(op=SUM, pre=1.0, post=1.0, used=1.0)
    all_given = contributions(layout, gradients, scaling)
    every = range(layout.world_size)
    slices = [packed(each, layout, every) for each in all_given]
    for rank, own in enumerate(all_given):
        wanted = torch.empty_like(slices[0][0])
        reduce_in_rank_order([each[rank] for each in slices], wanted, SUM)
        got = torch.full_like(wanted, torch.nan)
        others = [None if sender == rank else slices[sender][rank] for sender in every]
        own.reduce(others, got, SUM)
        assert torch.equal(got, wanted)


@given(cases(), st.integers(1, 60))
def test_spans_hold_what_whole_slices_hold_there(
    case: tuple[Layout, list[list[torch.Tensor | None]]], length: int
) -> None:
    layout, gradients = case
    scaling = ReduceScaling(op=SUM, pre=0.5, post=1.0, used=1.0)
    every, numel = range(layout.world_size), layout.buffer.slice_numel
    all_given = contributions(layout, gradients, scaling)
    slices = [packed(each, layout, every) for each in all_given]
    for start in {0, numel // 3, max(numel - length, 0)} if numel else ():
        end = min(start + length, numel)
        for rank, own in enumerate(all_given):
            span = own.span(start, end - start)
            for ranks in (every, range(rank), range(rank + 1, layout.world_size)):
                got = torch.full((len(ranks) * span.numel,), torch.nan, dtype=span.dtype)
                if ranks:
                    span.write(got, ranks)
                    wanted = slices[rank][ranks.start : ranks.stop, start:end]
                    assert torch.equal(got.view(len(ranks), -1), wanted)
            total = torch.full((span.numel,), torch.nan, dtype=span.dtype)
            parts = [each[rank, start:end] for each in slices]
            span.reduce([None if at == rank else parts[at] for at in every], total, SUM)
            wanted = torch.empty_like(total)
            reduce_in_rank_order(parts, wanted, SUM)
            assert torch.equal(total, wanted)


@given(
    world=st.integers(2, 5),
    widths=st.lists(st.sampled_from([(1,), (3,), (2, 5), (90, 101)]), min_size=1, max_size=5),
    marked=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_dense_gradients_that_are_cut_evenly_are_sent_and_added_as_they_are_cut(
    world: int, widths: list[tuple[int, ...]], marked: bool, dtype: torch.dtype
) -> None:
    specs = [TensorSpec(shape=(world * each[0], *each[1:]), dtype=dtype) for each in widths]
    layout = Layout(specs, world, mask_numel=len(specs) if marked else 0)
    gradients = [[torch.randn(spec.shape).to(dtype) for spec in specs] for _ in range(world)]
    scaling = ReduceScaling(op=SUM, pre=1.0, post=1.0, used=2.0)
    all_given = [Contribution(each, layout, rank, scaling) for rank, each in enumerate(gradients)]

    def part(sender: int, receiver: int) -> torch.Tensor:
        """What one rank sends to another: shards, mask, zeros."""
        shards = [each.chunk(world)[receiver].flatten() for each in gradients[sender]]
        sent = torch.cat([*shards, torch.full((layout.mask_numel,), 2.0, dtype=dtype)])
        return torch.nn.functional.pad(sent, (0, layout.buffer.slice_numel - sent.numel()))

    for rank, given_ in enumerate(all_given):
        for ranks in (range(rank), range(rank + 1, world)):
            if ranks:
                wanted = torch.stack([part(rank, receiver) for receiver in ranks])
                assert torch.equal(packed(given_, layout, ranks), wanted)
        parts = [part(sender, rank) for sender in range(world)]
        wanted = torch.empty_like(parts[0])
        reduce_in_rank_order(parts, wanted, SUM)
        got = torch.full_like(wanted, torch.nan)
        given_.reduce([None if each == rank else parts[each] for each in range(world)], got, SUM)
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("own", [0, 1, 2, 3])
def test_the_result_may_be_one_of_the_parts(own: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        parts = [torch.randn(1000).to(dtype) for _ in range(4)]
        wanted = torch.empty_like(parts[0])
        reduce_in_rank_order(parts, wanted, SUM)
        target = parts[own]
        reduce_in_rank_order(parts, target, SUM)
        assert torch.equal(target, wanted)

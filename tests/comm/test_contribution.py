"""Gradients reduced from where they lie, against packing them first."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from fullshard.comm import Layout, ReduceScaling, TensorSpec
from fullshard.comm.buffers.buffers import Buffer
from fullshard.comm.buffers.packing import pack_gradients
from fullshard.comm.transports.contribution import Contribution, Span
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


def packed(
    gradients: list[torch.Tensor | None], layout: Layout, scaling: ReduceScaling
) -> torch.Tensor:
    """The slices that one rank sends, ``[world, slice_numel]``."""
    buffer = no_numbers(layout.world_size * layout.buffer.slice_numel, layout.buffer.dtype)
    pack_gradients(Buffer(buffer, layout, 0), gradients, scaling)
    return buffer.view(layout.world_size, -1)


def no_numbers(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((numel,), torch.nan, dtype=dtype)


LARGE = Layout([TensorSpec(shape=(400, 101), dtype=torch.bfloat16)], 2)
RAMP = torch.linspace(-1, 1, 400 * 101).view(400, 101)


@given(cases(), st.integers(1, 60), st.sampled_from([1.0, 0.5]))
@example((LARGE, [[RAMP], [0.7 * RAMP]]), 7, 1.0)
def test_what_is_written_and_added_is_that_of_packed_slices_to_the_bit(
    case: tuple[Layout, list[list[torch.Tensor | None]]], length: int, pre: float
) -> None:
    """Of whole slices, and of spans."""
    layout, gradients = case
    dtype, numel = layout.buffer.dtype, layout.buffer.slice_numel
    scaling = ReduceScaling(op=SUM, pre=pre, post=1.0, used=1.0)
    slices = [packed(each, layout, scaling) for each in gradients]
    spans = {(at, min(at + length, numel)) for at in (0, numel // 3, max(numel - length, 0))}
    for rank, mine in enumerate(gradients):
        whole = Contribution(mine, layout, rank, scaling)
        inputs: list[tuple[Contribution | Span, int]] = [(whole, 0)]
        inputs += [(whole.span(start, end - start), start) for start, end in spans]
        for given_in, start in inputs if numel else ():
            end = start + given_in.numel
            for ranks in (range(rank), range(rank + 1, layout.world_size)):
                if ranks:
                    got = no_numbers(len(ranks) * given_in.numel, dtype)
                    given_in.write(got, ranks)
                    wanted = slices[rank][ranks.start : ranks.stop, start:end]
                    assert torch.equal(got.view(len(ranks), -1), wanted)
            parts = [each[rank, start:end] for each in slices]
            total, added = no_numbers(end - start, dtype), no_numbers(end - start, dtype)
            others = [None if at == rank else part for at, part in enumerate(parts)]
            given_in.reduce(others, total, SUM)
            reduce_in_rank_order(parts, added, SUM)
            assert torch.equal(total, added)


@pytest.mark.parametrize("own", [0, 1, 2, 3])
def test_the_result_may_be_one_of_the_parts(own: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        parts = [torch.randn(1000).to(dtype) for _ in range(4)]
        wanted = torch.empty_like(parts[0])
        reduce_in_rank_order(parts, wanted, SUM)
        target = parts[own]
        reduce_in_rank_order(parts, target, SUM)
        assert torch.equal(target, wanted)

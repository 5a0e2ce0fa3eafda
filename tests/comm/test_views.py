"""Packing and unpacking through views, against plain slicing and a collective done by hand."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.comm import Layout, TensorSpec
from fullshard.comm.layouts.views import full_views, gap_views, mask_view, piece_views, shard_views
from support.collectives import shard_of

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int16, torch.int64, torch.bool]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    dtypes = DTYPES if draw(st.booleans()) else [draw(st.sampled_from(DTYPES))]
    specs = []
    for _ in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        dim = draw(st.integers(0, max(len(shape) - 1, 0)))
        specs.append(TensorSpec(shape=shape, dtype=draw(st.sampled_from(dtypes)), dim=dim))
    mask = len(specs) if len({spec.dtype for spec in specs}) == 1 else 0
    return Layout(specs, draw(st.integers(1, 6)), mask_numel=mask)


def numbered(spec: TensorSpec) -> torch.Tensor:
    """A full tensor in which neighbours differ."""
    return (torch.arange(spec.numel) * 7 % 5).view(spec.shape).to(spec.dtype)


def new_slice(layout: Layout) -> torch.Tensor:
    return torch.zeros(layout.buffer.slice_numel, dtype=layout.buffer.dtype)


def new_buffer(layout: Layout) -> torch.Tensor:
    return new_slice(layout).repeat(layout.world_size)


@given(layouts())
def test_packing_gathering_and_unpacking_gives_the_full_tensors_back(
    layout: Layout,
) -> None:
    fulls = [numbered(spec) for spec in layout.specs]
    slices = []
    for rank in range(layout.world_size):
        packed = new_slice(layout)
        targets = shard_views(packed, layout, rank)
        for target, full, spec in zip(targets, fulls, layout.specs, strict=True):
            target.copy_(shard_of(full, spec, rank, layout.world_size))
        slices.append(packed)
    received = torch.cat(slices)  # what an all-gather gives
    gathered = piece_views(received, layout, range(layout.world_size))
    for pieces, full, spec, extent in zip(
        gathered, fulls, layout.specs, layout.extents, strict=True
    ):
        output = torch.zeros_like(full)
        for target, source in zip(full_views(output, spec, extent.pieces), pieces, strict=True):
            target.copy_(source)
        assert torch.equal(output, full)


@given(layouts())
def test_packing_gradients_puts_each_ranks_shard_in_its_slice(layout: Layout) -> None:
    buffer = new_buffer(layout)
    fulls = [numbered(spec) for spec in layout.specs]
    targets = piece_views(buffer, layout, range(layout.world_size))
    for pieces, full, spec, extent in zip(
        targets, fulls, layout.specs, layout.extents, strict=True
    ):
        for target, source in zip(pieces, full_views(full, spec, extent.pieces), strict=True):
            target.copy_(source)
    for rank, packed in enumerate(buffer.chunk(layout.world_size) if buffer.numel() else []):
        for got, full, spec in zip(
            shard_views(packed, layout, rank), fulls, layout.specs, strict=True
        ):
            assert torch.equal(got, shard_of(full, spec, rank, layout.world_size))


@given(layouts())
def test_shards_gaps_and_masks_cover_every_byte_of_the_buffer_once(
    layout: Layout,
) -> None:
    buffer = new_buffer(layout)
    everyone = range(layout.world_size)
    views = [piece for pieces in piece_views(buffer, layout, everyone) for piece in pieces]
    views += gap_views(buffer, layout, everyone)
    if layout.mask_numel:
        views.append(mask_view(buffer, layout))
    for view in views:
        if view.numel():
            view.view(torch.uint8).add_(1)
    assert torch.equal(buffer.view(torch.uint8), torch.ones(buffer.nbytes, dtype=torch.uint8))


def test_what_hundreds_of_ranks_hold_nothing_of_is_one_gap() -> None:
    specs = [TensorSpec(shape=(8, 3), dtype=torch.float32) for _ in range(100)]
    layout = Layout(specs, 256, mask_numel=100)
    gaps = gap_views(new_buffer(layout), layout, range(layout.world_size))
    assert len(gaps) <= 3


def test_full_views_follow_strides_and_storage_offsets() -> None:
    spec = TensorSpec(shape=(4, 6), dtype=torch.int64, dim=1)
    (extent,) = Layout([spec], 4).extents
    full = torch.arange(60).view(6, 10)[:, 3:7].t()  # shape (4, 6), strides (1, 10), offset 3
    first, *rest = full_views(full, spec, extent.pieces)
    assert not rest  # 6 rows on 4 ranks: three full chunks of 2, nobody has a tail
    assert torch.equal(first, torch.stack([full[:, 0:2], full[:, 2:4], full[:, 4:6]]))


def test_views_follow_a_buffers_storage_offset() -> None:
    layout = Layout(
        [TensorSpec(shape=(3,), dtype=torch.float32), TensorSpec(shape=(2,), dtype=torch.int64)], 1
    )
    pool = torch.zeros(layout.buffer.slice_numel + 64, dtype=torch.uint8)
    floats, integers = shard_views(pool[32:-32], layout, 0)
    floats.fill_(1.0)
    integers.fill_(-1)
    assert pool[:32].eq(0).all()
    assert pool[32:44].view(torch.float32).eq(1.0).all()
    assert pool[48:64].view(torch.int64).eq(-1).all()


def test_masks_lie_behind_the_tensors_of_every_slice() -> None:
    layout = Layout([TensorSpec(shape=(3,), dtype=torch.float32)], 2, mask_numel=1)
    buffer = new_buffer(layout)
    assert mask_view(buffer, layout).shape == (2, 1)
    mask_view(buffer, layout).fill_(5.0)
    assert buffer.tolist() == [0.0, 0.0, 5.0, 0.0] * 2

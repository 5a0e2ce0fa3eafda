"""The direct layout: large tensors are their own buffers, and views of it stay right."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.comm import (
    BufferSpec,
    DirectLayout,
    Layout,
    RankMajorLayout,
    TensorSpec,
    full_views,
    gap_views,
    marks_view,
    piece_views,
    shard_shapes,
    shard_views,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int16]


@st.composite
def layouts(draw: st.DrawFn) -> DirectLayout:
    """Any mix of tensors, of which any that may be are direct."""
    uniform = draw(st.booleans())
    dtypes = [draw(st.sampled_from(DTYPES))] if uniform else DTYPES
    world_size = draw(st.integers(1, 6))
    specs = []
    for _ in range(draw(st.integers(1, 5))):
        rows, columns = draw(st.integers(0, 40)), draw(st.sampled_from([1, 3, 4, 8]))
        dim = draw(st.sampled_from([0, 0, 0, 1]))
        dtype = draw(st.sampled_from(dtypes))
        specs.append(TensorSpec(shape=(rows, columns), dtype=dtype, dim=dim))
    may = [i for i, spec in enumerate(specs) if DirectLayout.eligible(spec, world_size)]
    direct = draw(st.sets(st.sampled_from(may))) if may else set()
    marks = len(specs) if uniform and draw(st.booleans()) else 0
    return DirectLayout(specs, world_size, direct, marks=marks)


def numbered(spec: TensorSpec) -> torch.Tensor:
    return (torch.arange(spec.numel) * 7 % 5).view(spec.shape).to(spec.dtype)


def shard_of(full: torch.Tensor, spec: TensorSpec, rank: int, world_size: int) -> torch.Tensor:
    rows = spec.shard_shape(rank, world_size)[spec.dim]
    return full.narrow(spec.dim, spec.first_row(rank, world_size), rows)


def new_buffers(layout: DirectLayout, slices: int) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.zeros(slices * spec.slice_numel, dtype=spec.dtype) for spec in layout.buffers
    )


@given(layouts())
def test_it_is_a_layout_of_one_buffer_each_and_one_for_the_rest(layout: DirectLayout) -> None:
    assert isinstance(layout, Layout)
    assert sorted((*layout.direct, *layout.others)) == list(range(len(layout.specs)))
    assert len(layout.buffers) == len(layout.direct) + (layout.rest is not None)
    assert (layout.rest is None) == (not layout.others and not layout.marks)
    for place, index in enumerate(layout.direct):
        slot = layout.slots[index]
        assert (slot.buffer, slot.offset) == (place, 0)
        assert layout.buffers[place].slice_nbytes % 16 == 0
    assert all(layout.slots[index].buffer == len(layout.direct) for index in layout.others)


@given(layouts())
def test_a_direct_buffer_begins_with_the_full_tensor(layout: DirectLayout) -> None:
    for place, index in enumerate(layout.direct):
        spec, buffer = layout.specs[index], layout.buffers[place]
        full = numbered(spec)
        parts = [
            torch.nn.functional.pad(
                shard_of(full, spec, rank, layout.world_size).flatten(),
                (0, buffer.slice_numel - shard_of(full, spec, rank, layout.world_size).numel()),
            )
            for rank in range(layout.world_size)
        ]
        gathered = torch.cat(parts)  # what an all-gather gives
        assert torch.equal(gathered[: spec.numel].view(spec.shape), full)


@given(layouts())
def test_packing_gathering_and_unpacking_gives_the_full_tensors_back(layout: DirectLayout) -> None:
    fulls = [numbered(spec) for spec in layout.specs]
    slices = []
    for rank in range(layout.world_size):
        own = new_buffers(layout, 1)
        for target, full, spec in zip(
            shard_views(own, layout, rank), fulls, layout.specs, strict=True
        ):
            target.copy_(shard_of(full, spec, rank, layout.world_size))
        slices.append(own)
    gathered = tuple(torch.cat(parts) for parts in zip(*slices, strict=True))
    for pieces, full, spec, slot in zip(
        piece_views(gathered, layout), fulls, layout.specs, layout.slots, strict=True
    ):
        output = torch.zeros_like(full)
        for target, source in zip(full_views(output, spec, slot), pieces, strict=True):
            target.copy_(source)
        assert torch.equal(output, full)


@given(layouts())
def test_pieces_marks_and_gaps_fill_every_buffer_exactly_once(layout: DirectLayout) -> None:
    buffers = new_buffers(layout, layout.world_size)
    views = [view for pieces in piece_views(buffers, layout) for view in pieces]
    views += gap_views(buffers, layout)
    if layout.marks:
        views.append(marks_view(buffers[-1], layout))
    for view in views:
        view.view(torch.uint8).add_(1) if view.dtype is not torch.uint8 else view.add_(1)
    assert all((buffer.view(torch.uint8) == 1).all() for buffer in buffers)


@given(layouts())
def test_shards_are_those_of_the_packed_layout(layout: DirectLayout) -> None:
    for rank in range(layout.world_size):
        assert shard_shapes(layout, rank) == shard_shapes(layout.packed, rank)


@given(layouts())
def test_layouts_compare_by_value(layout: DirectLayout) -> None:
    again = DirectLayout(layout.specs, layout.world_size, layout.direct, marks=layout.marks)
    assert again == layout and hash(again) == hash(layout)
    assert layout != layout.packed
    if layout.direct:
        assert DirectLayout(layout.specs, layout.world_size, (), marks=layout.marks) != layout


@pytest.mark.parametrize(
    ("spec", "eligible"),
    [
        (TensorSpec(shape=(8, 4), dtype=torch.float32), True),
        (TensorSpec(shape=(8, 4), dtype=torch.float32, dim=1), False),  # not in rank order
        (TensorSpec(shape=(6, 4), dtype=torch.float32), False),  # half as much padding
        (TensorSpec(shape=(39, 4), dtype=torch.float32), True),  # little padding
        (TensorSpec(shape=(8, 1), dtype=torch.float32), False),  # parts of 8 bytes
        (TensorSpec(shape=(16, 1), dtype=torch.float32), True),
        (TensorSpec(shape=(16, 1), dtype=torch.bfloat16), False),
        (TensorSpec(shape=(0, 4), dtype=torch.float32), False),
        (TensorSpec(shape=(), dtype=torch.float64), False),
    ],
)
def test_what_is_eligible_among_four_ranks(spec: TensorSpec, eligible: bool) -> None:
    assert DirectLayout.eligible(spec, 4) is eligible


def test_marks_without_any_other_tensor_have_a_buffer_of_their_own() -> None:
    spec = TensorSpec(shape=(8, 4), dtype=torch.float32)
    layout = DirectLayout([spec], 2, [0], marks=1)
    assert layout.buffers == (
        BufferSpec(dtype=torch.float32, slice_numel=16),
        BufferSpec(dtype=torch.float32, slice_numel=4),
    )
    assert layout.marks_offset == 0
    assert layout.packed == RankMajorLayout([spec], 2, marks=1)
    assert "1 of 1 tensors" in repr(layout)


@pytest.mark.parametrize(("direct", "message"), [([1], "the place 1"), ([0], "along dim 1")])
def test_a_tensor_that_cannot_be_direct_is_refused(direct: list[int], message: str) -> None:
    spec = TensorSpec(shape=(8, 4), dtype=torch.float32, dim=1)
    with pytest.raises(ValueError, match=re.escape(message)):
        DirectLayout([spec], 2, direct)

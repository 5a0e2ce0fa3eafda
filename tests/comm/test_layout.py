"""Where rows and bytes lie: tensor specs and the rank-major layout, against torch.chunk."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.comm import BufferSpec, Layout, TensorSpec
from fullshard.comm.layouts.layout import Piece

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
]
_ANY_DTYPE = st.sampled_from(DTYPES)
WORLDS = st.integers(1, 9)


@st.composite
def tensor_specs(
    draw: st.DrawFn, dtypes: st.SearchStrategy[torch.dtype] = _ANY_DTYPE
) -> TensorSpec:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    dims = max(len(shape), 1)
    dtype = draw(dtypes)
    return TensorSpec(shape=shape, dtype=dtype, dim=draw(st.integers(-dims, dims - 1)))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any mix of tensors; a mask where the dtype is uniform."""
    uniform = draw(st.booleans())
    one = st.just(draw(_ANY_DTYPE)) if uniform else _ANY_DTYPE
    specs = draw(st.lists(tensor_specs(one), min_size=1, max_size=6))
    mask = draw(st.sampled_from([0, 1, len(specs)])) if uniform else 0
    return Layout(specs, draw(WORLDS), mask_numel=mask)


@given(tensor_specs(), WORLDS)
def test_shard_shapes_are_those_of_torch_chunk(spec: TensorSpec, world_size: int) -> None:
    full = torch.empty(spec.shape or (1,), dtype=spec.dtype)
    chunks = [tuple(chunk.shape) for chunk in full.chunk(world_size, spec.dim)]
    if full.size(spec.dim) == 0:
        chunks = chunks[:1]  # torch gives every rank an empty chunk of its own, as we do
    empty = list(full.shape)
    empty[spec.dim] = 0
    chunks += [tuple(empty)] * (world_size - len(chunks))
    assert [spec.shard_shape(rank, world_size) for rank in range(world_size)] == chunks


@given(tensor_specs(), WORLDS)
def test_shards_cover_every_row_once(spec: TensorSpec, world_size: int) -> None:
    rows = [spec.shard_shape(rank, world_size)[spec.dim] for rank in range(world_size)]
    firsts = [spec.first_row(rank, world_size) for rank in range(world_size)]
    assert sum(rows) == spec.rows
    assert firsts == [sum(rows[:rank]) for rank in range(world_size)]
    assert spec.numel == spec.rows * spec.row_numel


def test_a_negative_dim_means_the_same_tensor_spec() -> None:
    negative = TensorSpec(shape=(2, 3, 4), dtype=torch.float32, dim=-1)
    assert negative == TensorSpec(shape=(2, 3, 4), dtype=torch.float32, dim=2)
    assert TensorSpec(shape=torch.Size([2]), dtype=torch.int8).shape == (2,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": (2, 3), "dtype": torch.float32, "dim": 2}, r"dim 2 .* in \[-2, 1\]"),
        ({"shape": (), "dtype": torch.float32, "dim": -2}, r"dim -2 .* in \[-1, 0\]"),
        ({"shape": (2, -1), "dtype": torch.float32}, "sizes must be >= 0"),
        ({"shape": (2,), "dtype": "float32"}, "torch.dtype"),
    ],
)
def test_an_impossible_spec_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TensorSpec(**arguments)


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_the_world_has_no_shard(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} of world size {world_size}"):
        TensorSpec(shape=(3,), dtype=torch.float32).shard_shape(rank, world_size)


SPEC = TensorSpec(shape=(3, 2), dtype=torch.float32)
HALF = TensorSpec(shape=(3, 2), dtype=torch.float16)
ALIGNMENT = 16  # bytes, on which runs and slices start


@pytest.mark.parametrize(
    ("specs", "world_size", "options", "message"),
    [
        ([], 2, {}, "at least one TensorSpec"),
        ([SPEC], 0, {}, "world_size 0; it must be an int >= 1"),
        ([SPEC], 2, {"mask_numel": -1}, "mask_numel -1"),
        ([SPEC, HALF], 2, {"mask_numel": 2}, "mask_numel=2 with mixed dtypes"),
    ],
)
def test_an_impossible_layout_is_refused(
    specs: list[TensorSpec], world_size: int, options: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Layout(specs, world_size, **options)


@given(layouts())
def test_extents_are_disjoint_aligned_and_inside_the_slice(layout: Layout) -> None:
    buffer = layout.buffer
    ends = 0
    run: torch.dtype | None = None
    taken = [
        (extent.offset, spec.chunk_rows(layout.world_size) * spec.row_numel, spec.dtype)
        for spec, extent in zip(layout.specs, layout.extents, strict=True)
    ]
    for offset, chunk, dtype in sorted(taken, key=lambda each: each[:2]):
        assert offset >= ends
        assert offset % dtype.itemsize == 0
        if chunk and dtype is not run:
            assert offset % ALIGNMENT == 0
            run = dtype
        ends = offset + chunk * dtype.itemsize
    assert layout.mask_offset == ends
    assert layout.mask_offset + layout.mask_numel * buffer.dtype.itemsize <= buffer.slice_nbytes
    assert buffer.slice_nbytes % ALIGNMENT == 0


@given(layouts())
def test_padding_is_what_neither_a_chunk_nor_the_mask_takes(layout: Layout) -> None:
    buffer = layout.buffer
    chunks = sum(
        spec.chunk_rows(layout.world_size) * spec.row_numel * spec.dtype.itemsize
        for spec in layout.specs
    )
    mask = layout.mask_numel * buffer.dtype.itemsize
    dtypes = len({spec.dtype for spec in layout.specs})
    assert 0 <= buffer.slice_nbytes - chunks - mask < ALIGNMENT * dtypes


@given(tensor_specs(), WORLDS)
def test_the_pieces_of_an_extent_are_the_shards_that_have_elements(
    spec: TensorSpec, world_size: int
) -> None:
    (extent,) = Layout([spec], world_size).extents
    assert len(extent.pieces) <= 2
    told = [
        (rank, piece.start + index * piece.shard_shape[spec.dim], piece.shard_shape)
        for piece in extent.pieces
        for index, rank in enumerate(range(piece.first_rank, piece.first_rank + piece.ranks))
    ]
    shapes = [spec.shard_shape(rank, world_size) for rank in range(world_size)]
    held = [
        (rank, spec.first_row(rank, world_size), shape)
        for rank, shape in enumerate(shapes)
        if 0 not in shape
    ]
    assert told == held


def test_runs_of_one_dtype_lie_together_in_order_of_first_appearance() -> None:
    specs = [
        TensorSpec(shape=(3,), dtype=torch.float16),
        TensorSpec(shape=(5,), dtype=torch.float32),
        TensorSpec(shape=(4,), dtype=torch.float16),
    ]
    layout = Layout(specs, 1)
    # fp16: 3 + 4 elements are 14 bytes, so the fp32 run starts at 16 and ends at 36.
    assert [extent.offset for extent in layout.extents] == [0, 16, 6]
    assert layout.buffer == BufferSpec(dtype=torch.uint8, slice_numel=48)
    assert layout.mask_offset == 36


def test_a_uniform_layout_has_its_tensors_dtype_and_a_mask_after_them() -> None:
    layout = Layout([SPEC, SPEC], 2, mask_numel=2)
    # Two chunks of 2 rows of 2 floats are 32 bytes; a mask of two and two floats of padding follow.
    assert layout.buffer == BufferSpec(dtype=torch.float32, slice_numel=12)
    assert layout.mask_offset == 32
    assert layout.extents[1].pieces == (
        Piece(first_rank=0, ranks=1, start=0, shard_shape=(2, 2)),
        Piece(first_rank=1, ranks=1, start=2, shard_shape=(1, 2)),
    )


def test_layouts_compare_and_hash_by_value() -> None:
    first, second = (
        Layout([SPEC], 2, mask_numel=1),
        Layout([SPEC], 2, mask_numel=1),
    )
    assert first == second
    assert hash(first) == hash(second)
    for other in (
        Layout([SPEC], 3, mask_numel=1),
        Layout([SPEC], 2),
        Layout([HALF], 2, mask_numel=1),
    ):
        assert first != other
    assert first != "a layout"

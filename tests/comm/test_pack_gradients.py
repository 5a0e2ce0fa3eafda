"""Packing gradients for a reduction: the same bytes whichever way is quickest."""

from __future__ import annotations

import math

import pytest
import torch

from fullshard.comm import Layout, ReduceScaling, TensorSpec, reduction_scaling
from fullshard.comm.buffers.buffers import Buffer
from fullshard.comm.buffers.packing import pack_gradients
from fullshard.comm.layouts.views import divides_evenly, gap_views, mask_view, piece_views

# The rows of each tensor and the ranks; whether all ranks have equally many rows.
WORLDS = [
    ((3, 3), 8, False),  # one row each, most ranks have none
    ((6, 6), 4, False),  # two rows each, the last rank has none
    ((8, 8), 4, True),
    ((8, 4), 4, True),
    ((8, 4), 8, False),  # on eight ranks and on four
    ((7, 7), 4, False),  # the last rank has one of two rows
    ((1, 1), 1, True),
]


def layout_of(rows: tuple[int, ...], world_size: int) -> Layout:
    specs = [TensorSpec(shape=(n, 5), dtype=torch.float32) for n in rows]
    return Layout(specs, world_size, mask_numel=len(specs))


def dirty_buffer(layout: Layout) -> Buffer:
    spec = layout.buffer
    numel = spec.slice_numel * layout.world_size
    return Buffer(torch.full((numel,), math.nan), layout, 0)


def assert_packed(
    packed: Buffer, gradients: list[torch.Tensor | None], scaling: ReduceScaling
) -> None:
    """Each rank's rows of each gradient, its mask, and zeros in all the rest."""
    layout, buffer = packed.layout, packed.tensor
    mask = mask_view(buffer, layout)
    for index, (gradient, pieces) in enumerate(
        zip(gradients, piece_views(buffer, layout, range(layout.world_size)), strict=True)
    ):
        lying = torch.cat([piece.reshape(-1) for piece in pieces])
        wanted = torch.zeros(lying.numel()) if gradient is None else gradient.reshape(-1).float()
        assert torch.equal(lying, wanted)
        assert mask[:, index].eq(0.0 if gradient is None else scaling.used).all()
    assert all(gap.eq(0).all() for gap in gap_views(buffer, layout, range(layout.world_size)))


@pytest.mark.parametrize(("rows", "world_size", "even"), WORLDS)
def test_a_buffer_that_serves_again_holds_what_each_reduction_packs(
    rows: tuple[int, ...], world_size: int, even: bool
) -> None:
    layout = layout_of(rows, world_size)
    assert divides_evenly(layout) == even
    scaling = reduction_scaling(world_size, torch.float32, averages=False)
    packed = dirty_buffer(layout)
    kinds = ["plain", "strided", "missing", "bf16", "fp16", "plain", "bf16"]
    for kind in kinds:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind, torch.float32)
        gradients: list[torch.Tensor | None] = [torch.randn(n, 5).to(dtype) for n in rows]
        if kind == "strided":
            gradients[0] = torch.randn(5, rows[0]).t()
        if kind == "missing":
            gradients[-1] = None
        pack_gradients(packed, gradients, scaling)
        assert_packed(packed, gradients, scaling)


def test_tensors_that_lie_otherwise_are_not_taken_for_rows_side_by_side() -> None:
    columns = TensorSpec(shape=(4, 6), dtype=torch.float32, dim=1)
    assert not divides_evenly(Layout([columns], 2))
    number = TensorSpec(shape=(), dtype=torch.float32)
    assert not divides_evenly(Layout([number], 2))
    mixed = [TensorSpec(shape=(4,), dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    assert not divides_evenly(Layout([mixed[1], mixed[0]], 4))

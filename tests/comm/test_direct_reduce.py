"""Direct reductions: bit for bit what a packed one gives, from where the gradients lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm.stand_ins import CPU
from fullshard.comm import (
    BufferPool,
    CommStreams,
    DefaultReduceScatter,
    DirectLayout,
    EventKind,
    EventLog,
    ExchangeTransport,
    ReduceInFlight,
    ReduceLane,
    TensorSpec,
    foreach_reduce,
    foreach_reduce_direct,
    observe,
    reduction_scaling,
)
from support.ranks import distributed

SHAPES = [((8, 4), 0), ((5, 3), 0), ((39, 4), 0), ((3, 7), 1), ((), 0), ((32, 2), 0), ((0, 3), 0)]
DIRECT = (0, 2, 5)


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def lane_of(
    dtype: torch.dtype = torch.float32, comm: Any = None, factor: float | None = None
) -> ReduceLane:
    return ReduceLane(
        comm=DefaultReduceScatter(transport=ExchangeTransport()) if comm is None else comm,
        process_group=world(),
        streams=CommStreams(CPU),
        device=CPU,
        scaling=reduction_scaling(world().size(), dtype, averages=False, divide_factor=factor),
        name="blocks.0",
        source=BufferPool(),
    )


def layout_of(
    dtype: torch.dtype = torch.float32, direct: Sequence[int] | None = None
) -> DirectLayout:
    size = world().size()
    specs = [TensorSpec(shape=shape, dtype=dtype, dim=dim) for shape, dim in SHAPES]
    if direct is None:
        direct = [i for i in DIRECT if DirectLayout.eligible(specs[i], size)]
    return DirectLayout(specs, size, direct, marks=len(specs))


def gradients_of(dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(100 * seed + world().rank())
    return [torch.randn(shape, generator=generator).to(dtype) for shape, _ in SHAPES]


def assert_like_packed(
    in_flight: ReduceInFlight, gradients: Sequence[torch.Tensor | None], lane: ReduceLane
) -> None:
    """The same bits as a packed reduction, in the same places."""
    packed = foreach_reduce(gradients, in_flight.layout, lane)
    got, want = in_flight.wait(), packed.wait()
    assert all(torch.equal(a, b) for a, b in zip(got.shards, want.shards, strict=True))
    assert got.marks is not None and want.marks is not None
    assert torch.equal(got.marks, want.marks)
    assert torch.equal(in_flight.output, packed.output)  # padding and all


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@distributed(2, 4)
def test_no_bit_differs_from_a_packed_reduction(dtype: torch.dtype) -> None:
    layout, lane = layout_of(dtype), lane_of(dtype)
    assert layout.direct
    for seed in range(3):
        gradients = gradients_of(dtype, seed)
        assert_like_packed(foreach_reduce_direct(gradients, layout, lane), gradients, lane)


@distributed(2, 4)
def test_gradients_that_are_cast_strided_or_missing_on_some_ranks_do_not_either() -> None:
    layout, lane = layout_of(), lane_of(factor=3.0)
    gradients = gradients_of(torch.float32)
    rank = world().rank()
    if rank == 0:
        gradients[0] = gradients[1] = None
    else:
        gradients[0] = torch.randn(8, 4).bfloat16()
    gradients[5] = torch.randn(2, 32).t() if rank == 1 else None
    gradients[2] = None
    in_flight = foreach_reduce_direct(gradients, layout, lane)
    assert_like_packed(in_flight, gradients, lane)
    marks = in_flight.wait().marks
    assert marks is not None
    assert (marks > 0).tolist() == [True, True, False, True, True, True, True]


@distributed(2)
def test_all_gradients_may_be_direct_and_marks_come_all_the_same() -> None:
    specs = [TensorSpec(shape=(8, 4), dtype=torch.float32)] * 2
    layout, lane = DirectLayout(specs, 2, [0, 1], marks=2), lane_of()
    gradients = [torch.randn(8, 4) if world().rank() else None, None]
    in_flight = foreach_reduce_direct(gradients, layout, lane)
    assert_like_packed(in_flight, gradients, lane)
    marks = in_flight.wait().marks
    assert marks is not None and marks.tolist() == [1.0, 0.0]


@distributed(2)
def test_gradients_are_what_the_collective_reads_and_live_until_it_is_over() -> None:
    class Recording(ExchangeTransport):
        def reduce_scatter_list(self, outputs: Any, inputs: Any, *rest: Any) -> Any:
            seen.extend(each.data_ptr() for each in inputs)
            return super().reduce_scatter_list(outputs, inputs, *rest)

    seen: list[int] = []
    layout, lane = layout_of(), lane_of(comm=DefaultReduceScatter(transport=Recording()))
    gradients = gradients_of(torch.float32)
    in_flight = foreach_reduce_direct(gradients, layout, lane)
    assert layout.direct == (0, 2, 5)
    first, ragged, last = (gradients[index] for index in layout.direct)
    assert first is not None and ragged is not None and last is not None
    assert (seen[0], seen[2]) == (first.data_ptr(), last.data_ptr())
    assert seen[1] != ragged.data_ptr()  # 39 rows on 2 ranks: padded
    assert first.data_ptr() in [each.data_ptr() for each in in_flight.lent]
    in_flight.wait()
    assert in_flight.lent == () and in_flight.inputs == ()


@distributed(2)
def test_one_collective_each_and_one_for_the_rest() -> None:
    layout, lane = layout_of(), lane_of()
    gradients = gradients_of(torch.float32)
    log = EventLog()
    with observe(log):
        foreach_reduce_direct(gradients, layout, lane).wait()
    reduced = [each.nbytes for each in log.events if each.kind is EventKind.REDUCE_SCATTER]
    (copied,) = [each.nbytes for each in log.events if each.kind is EventKind.COPY_IN]
    assert reduced == [2 * spec.slice_nbytes for spec in layout.buffers]
    assert copied == reduced[1] + reduced[3]  # the ragged one, and the rest


@distributed(2)
def test_gradients_of_a_wrong_shape_are_refused_before_anything_travels() -> None:
    gradients = gradients_of(torch.float32)
    gradients[0] = torch.ones(4, 8)
    with pytest.raises(ValueError, match=r"blocks\.0: gradient 0 has shape \(4, 8\)"):
        foreach_reduce_direct(gradients, layout_of(), lane_of())

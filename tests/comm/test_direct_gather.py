"""Direct gathers: equal to the full tensors, in place, and never where somebody wants a say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm.stand_ins import CPU
from fullshard.comm import (
    BufferPool,
    CastCodec,
    CommStreams,
    DefaultAllGather,
    DefaultReduceScatter,
    DirectLayout,
    DirectTensors,
    EventKind,
    EventLog,
    ExchangeTransport,
    GatherLane,
    ProcessGroupTransport,
    RankMajorLayout,
    SelfTransport,
    SharedMemoryTransport,
    TensorSpec,
    default_all_gather,
    foreach_all_gather,
    foreach_all_gather_copy_out,
    foreach_all_gather_direct,
    list_transport_of,
    observe,
    set_shared_memory,
)
from support.ranks import distributed

# Even, ragged (the last of four ranks has fewer rows), small, another dim and dtype.
SPECS = [
    TensorSpec(shape=(8, 4), dtype=torch.float32),
    TensorSpec(shape=(5, 3), dtype=torch.float32),
    TensorSpec(shape=(39, 4), dtype=torch.float32),
    TensorSpec(shape=(3, 7), dtype=torch.int64, dim=1),
    TensorSpec(shape=(16, 2), dtype=torch.float64),
]
OWN = ProcessGroupTransport()


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def lane_of(comm: Any = None) -> GatherLane:
    return GatherLane(
        comm=DefaultAllGather(transport=OWN) if comm is None else comm,
        process_group=world(),
        streams=CommStreams(CPU),
        device=CPU,
        name="blocks.0",
        source=BufferPool(),
    )


def fulls_of(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 99, spec.shape, generator=generator).to(spec.dtype) for spec in SPECS]


def shards_of(fulls: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    rank, size = world().rank(), world().size()
    return [
        full.narrow(
            spec.dim, spec.first_row(rank, size), spec.shard_shape(rank, size)[spec.dim]
        ).clone()
        for full, spec in zip(fulls, SPECS, strict=True)
    ]


def layout_of(direct: Sequence[int] = (0, 2, 4)) -> DirectLayout:
    return DirectLayout(SPECS, world().size(), direct)


def targets_of(layout: DirectLayout) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Full tensors, and the flat ones with room behind them."""
    padded = {
        index: torch.full((spec.slice_numel * layout.world_size,), 77, dtype=spec.dtype)
        for index, spec in zip(layout.direct, layout.buffers, strict=False)
    }
    fulls = [
        padded[index][: spec.numel].view(spec.shape)
        if index in padded
        else torch.empty(spec.shape, dtype=spec.dtype)
        for index, spec in enumerate(SPECS)
    ]
    return fulls, [padded[index] for index in layout.direct]


@pytest.mark.parametrize("direct", [(), (0,), (0, 2, 4)], ids=str)
@distributed(2, 4)
def test_it_gives_the_full_tensors_again_and_again(direct: tuple[int, ...]) -> None:
    layout, lane = layout_of(direct), lane_of()
    fulls, padded = targets_of(layout)
    target = DirectTensors(fulls, padded, layout, lane)
    for seed in range(3):
        in_flight = foreach_all_gather_direct(shards_of(fulls_of(seed)), target, lane)
        in_flight.wait()
        in_flight.wait()
        for got, want in zip(fulls, fulls_of(seed), strict=True):
            assert torch.equal(got, want)


@distributed(2, 4)
def test_all_tensors_may_be_direct() -> None:
    specs = [SPECS[0], SPECS[2]]
    lane = lane_of()
    layout = DirectLayout(specs, world().size(), [0, 1])
    padded = [torch.empty(s.slice_numel * layout.world_size) for s in layout.buffers]
    fulls = [each[: s.numel].view(s.shape) for each, s in zip(padded, specs, strict=True)]
    target = DirectTensors(fulls, padded, layout, lane)
    want = [fulls_of()[0], fulls_of()[2]]
    mine = [shards_of(fulls_of())[0], shards_of(fulls_of())[2]]
    foreach_all_gather_direct(mine, target, lane).wait()
    assert all(torch.equal(got, each) for got, each in zip(fulls, want, strict=True))


@distributed(2)
def test_a_shard_of_another_dtype_is_cast_on_its_way_and_one_with_strides_made_even() -> None:
    layout, lane = layout_of(), lane_of()
    fulls, padded = targets_of(layout)
    shards = shards_of(fulls_of())
    shards[0] = shards[0].double()
    shards[4] = shards[4].t().contiguous().t()
    foreach_all_gather_direct(shards, DirectTensors(fulls, padded, layout, lane), lane).wait()
    assert all(torch.equal(got, want) for got, want in zip(fulls, fulls_of(), strict=True))


@distributed(2)
def test_shards_are_what_the_collective_reads_and_full_tensors_what_it_writes() -> None:
    class Recording(ProcessGroupTransport):
        def all_gather_list(self, outputs: Any, inputs: Any, *rest: Any) -> Any:
            pairs = zip(outputs, inputs, strict=True)
            seen.append([(output.data_ptr(), input.data_ptr()) for output, input in pairs])
            return super().all_gather_list(outputs, inputs, *rest)

    seen: list[list[tuple[int, int]]] = []
    layout, lane = layout_of((0, 4)), lane_of(DefaultAllGather(transport=Recording()))
    fulls, padded = targets_of(layout)
    shards = shards_of(fulls_of())
    foreach_all_gather_direct(shards, DirectTensors(fulls, padded, layout, lane), lane).wait()
    assert seen == [[(fulls[i].data_ptr(), shards[i].data_ptr()) for i in (0, 4)]]


@distributed(2)
def test_one_collective_each_and_one_for_the_rest_and_only_that_is_packed() -> None:
    layout, lane = layout_of(), lane_of()
    fulls, padded = targets_of(layout)
    target, shards = DirectTensors(fulls, padded, layout, lane), shards_of(fulls_of())
    log = EventLog()
    with observe(log):
        foreach_all_gather_direct(shards, target, lane).wait()
    sizes = {kind: [e.nbytes for e in log.events if e.kind is kind] for kind in EventKind}
    assert layout.rest is not None
    (rest,) = layout.rest.buffers
    ragged = [shards[2].nbytes] if world().rank() == 1 else []  # into its place in the output
    assert sizes[EventKind.ALL_GATHER] == [2 * rest.slice_nbytes, 128, 640, 256]
    assert sizes[EventKind.COPY_IN] == [rest.slice_nbytes, *ragged]
    assert sizes[EventKind.COPY_OUT] == [fulls[1].nbytes + fulls[3].nbytes]


@distributed(2)
def test_one_that_nobody_wants_is_waited_for_and_the_next_is_right() -> None:
    layout, lane = layout_of(), lane_of()
    fulls, padded = targets_of(layout)
    target = DirectTensors(fulls, padded, layout, lane)
    foreach_all_gather_direct(shards_of(fulls_of(1)), target, lane).discard()
    foreach_all_gather_direct(shards_of(fulls_of(2)), target, lane).wait()
    assert all(torch.equal(got, want) for got, want in zip(fulls, fulls_of(2), strict=True))


@distributed(2)
def test_once_finished_shards_may_change() -> None:
    layout, lane = layout_of(), lane_of()
    fulls, padded = targets_of(layout)
    shards = shards_of(fulls_of())
    in_flight = foreach_all_gather_direct(shards, DirectTensors(fulls, padded, layout, lane), lane)
    in_flight.finish()
    for shard in shards:
        shard.zero_()
    in_flight.wait()
    assert all(torch.equal(got, want) for got, want in zip(fulls, fulls_of(), strict=True))


@distributed(4)
def test_it_equals_the_packed_gather_bit_for_bit() -> None:
    layout, lane = layout_of(), lane_of()
    fulls, padded = targets_of(layout)
    shards = shards_of([torch.randn(s.shape).to(s.dtype) for s in SPECS])
    foreach_all_gather_direct(shards, DirectTensors(fulls, padded, layout, lane), lane).wait()
    packed = [torch.empty(spec.shape, dtype=spec.dtype) for spec in SPECS]
    in_flight = foreach_all_gather(shards, RankMajorLayout(SPECS, world().size()), lane)
    foreach_all_gather_copy_out(in_flight, packed)
    assert all(torch.equal(got, want) for got, want in zip(fulls, packed, strict=True))


class _Own(DefaultAllGather):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


@distributed(2)
def test_lists_are_moved_only_where_nobody_else_wants_a_say() -> None:
    group = world()
    moved: list[Any] = [
        DefaultAllGather(transport=OWN),
        DefaultReduceScatter(transport=ExchangeTransport()),
    ]
    kept: list[Any] = [
        DefaultAllGather(transport=OWN, codec=CastCodec(torch.bfloat16)),
        DefaultAllGather(transport=SelfTransport()),
        DefaultAllGather(transport=SharedMemoryTransport()),
        default_all_gather(group),  # ranks that share memory
        _Own(transport=OWN),
        object(),
    ]
    assert all(list_transport_of(comm, group, CPU) is not None for comm in moved)
    assert all(list_transport_of(comm, group, CPU) is None for comm in kept)
    set_shared_memory(False)
    try:
        assert list_transport_of(default_all_gather(group), group, CPU) is not None
    finally:
        set_shared_memory(True)


@distributed(2)
def test_a_collective_that_moves_no_lists_is_refused_before_anything_travels() -> None:
    layout, lane = layout_of(), lane_of(_Own(transport=OWN))
    fulls, padded = targets_of(layout)
    target = DirectTensors(fulls, padded, layout, lane)
    with pytest.raises(ValueError, match=r"blocks\.0: _Own has no list_transport"):
        foreach_all_gather_direct(shards_of(fulls_of()), target, lane)


@distributed(2)
def test_flat_tensors_that_do_not_fit_are_refused() -> None:
    layout, lane = layout_of((2,)), lane_of()
    fulls, padded = targets_of(layout)
    with pytest.raises(ValueError, match="0 padded tensors for 1"):
        DirectTensors(fulls, [], layout, lane)
    with pytest.raises(ValueError, match="flat with 160 elements"):
        DirectTensors(fulls, [padded[0][:-1]], layout, lane)
    with pytest.raises(ValueError, match="begin with the output"):
        DirectTensors(fulls, [padded[0].clone()], layout, lane)

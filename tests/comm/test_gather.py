"""Gathering lists of shards: equal to the full tensors, whatever the collective."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm.stand_ins import AloneAllGather, group_of, stand_in_accelerator
from fullshard.comm import (
    AllGatherInFlight,
    EventKind,
    EventLog,
    Layout,
    TensorSpec,
    foreach_all_gather,
    foreach_all_gather_copy_out,
    observe,
)
from fullshard.comm.collectives.gather import FullTensors
from fullshard.comm.layouts.layout import PacksItself
from support.collectives import Allocates, gather_config, shard_of
from support.ranks import distributed, world

# Uneven, smaller than the world, a scalar, no elements, other dims, and dtypes of every width.
SPECS = [
    TensorSpec(shape=(5, 3), dtype=torch.float32),
    TensorSpec(shape=(), dtype=torch.float64),
    TensorSpec(shape=(3, 7), dtype=torch.int64, dim=1),
    TensorSpec(shape=(2, 9, 4), dtype=torch.bfloat16, dim=1),
    TensorSpec(shape=(0, 3), dtype=torch.float32),
    TensorSpec(shape=(1,), dtype=torch.int16),
    TensorSpec(shape=(3,), dtype=torch.bool),
    TensorSpec(shape=(4, 4), dtype=torch.float16, dim=-1),
    TensorSpec(shape=(7,), dtype=torch.uint8),
]


def fulls_of(specs: Sequence[TensorSpec], seed: int = 0) -> list[torch.Tensor]:
    """The same full tensors on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 100, spec.shape, generator=generator).to(spec.dtype) for spec in specs]


def shards_of(
    fulls: Sequence[torch.Tensor], specs: Sequence[TensorSpec], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """This rank's shards by plain slicing."""
    return [
        shard_of(full, spec, group.rank(), group.size()).clone()
        for full, spec in zip(fulls, specs, strict=True)
    ]


def empties(specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    return [torch.empty(spec.shape, dtype=spec.dtype) for spec in specs]


def assert_gathered(
    in_flight: AllGatherInFlight, specs: Sequence[TensorSpec], fulls: Sequence[torch.Tensor]
) -> None:
    """What was gathered, copied out, are the full tensors."""
    outputs = empties(specs)
    foreach_all_gather_copy_out(in_flight, outputs)
    for output, full in zip(outputs, fulls, strict=True):
        assert torch.equal(output, full)


@pytest.mark.parametrize("async_op", [True, False])
@distributed(2, 4)
def test_every_rank_gets_the_full_tensors_of_any_shape_dim_and_dtype(async_op: bool) -> None:
    group = world()
    fulls = fulls_of(SPECS)
    layout = Layout(SPECS, group.size())
    in_flight = foreach_all_gather(
        shards_of(fulls, SPECS, group), layout, gather_config(group), async_op=async_op
    )
    assert_gathered(in_flight, SPECS, fulls)


@pytest.mark.parametrize("rows", [(4, 8), (2, 2), (8, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@distributed(2, 4)
def test_even_tensors_of_one_dtype_are_gathered_whatever_padding_follows_them(
    dtype: torch.dtype, rows: tuple[int, int]
) -> None:
    """One call copies all of them out; shards in float32 are cast on the way in."""
    group = world()
    specs = [
        TensorSpec(shape=(count, width), dtype=dtype)
        for count, width in zip(rows, (3, 5), strict=True)
    ]
    fulls = fulls_of(specs)
    layout = Layout(specs, group.size())
    config = gather_config(group)
    shards = [shard.float() for shard in shards_of(fulls, specs, group)]
    for _ in range(2):
        assert_gathered(foreach_all_gather(shards, layout, config), specs, fulls)


class _Doubled(PacksItself):
    """A code that is as large as what it codes, in the dtype of the buffer: twice each number."""

    __slots__ = ()

    @property
    def arrives_as(self) -> TensorSpec:
        return TensorSpec(shape=self.shape, dtype=torch.float32)

    def pack(self, shard: torch.Tensor, target: torch.Tensor, rank: int) -> None:
        target.copy_((shard * 2).view(target.shape))

    def unpack(self, pieces: Sequence[torch.Tensor], full: torch.Tensor, world_size: int) -> None:
        (codes,) = pieces
        full.copy_((codes / 2).view(full.shape))


def test_a_code_as_large_as_its_tensor_is_not_taken_for_the_tensor() -> None:
    specs = [
        _Doubled(shape=(1, 16), dtype=torch.uint8),
        TensorSpec(shape=(1, 16), dtype=torch.uint8),
    ]
    shards = [torch.full((1, 16), 0.5), torch.full((1, 16), 3, dtype=torch.uint8)]
    layout, config = Layout(specs, 1), gather_config(group_of(0, 1))
    in_flight = foreach_all_gather(shards, layout, config)
    assert buffer_of(in_flight).tolist() == [1] * 16 + [3] * 16
    outputs = [torch.empty(1, 16), torch.empty(1, 16, dtype=torch.uint8)]
    foreach_all_gather_copy_out(in_flight, outputs)
    assert all(torch.equal(output, shard) for output, shard in zip(outputs, shards, strict=True))


def test_tensors_that_were_filled_in_inference_mode_are_filled_in_training_too() -> None:
    specs = [TensorSpec(shape=(3,), dtype=torch.float32)]  # a slice has an element of padding
    layout, config = Layout(specs, 1), gather_config(group_of(0, 1))
    outputs = empties(specs)
    with torch.inference_mode():
        full = FullTensors(outputs, layout, config)
        full.fill(foreach_all_gather([torch.ones(3)], layout, config))
    full.fill(foreach_all_gather([torch.full((3,), 2.0)], layout, config))
    assert torch.equal(outputs[0], torch.full((3,), 2.0))


@distributed(2)
def test_several_gathers_are_under_way_at_once_and_claimed_in_any_order() -> None:
    group = world()
    layout = Layout(SPECS, group.size())
    config = gather_config(group)
    lists = [fulls_of(SPECS, seed) for seed in range(3)]
    flights = [foreach_all_gather(shards_of(each, SPECS, group), layout, config) for each in lists]
    assert all(flight.work is not None for flight in flights)  # on CPU all are asynchronous
    flights[1].discard()
    for index in (2, 0):
        assert_gathered(flights[index], SPECS, lists[index])


@distributed(2)
def test_shards_are_cast_on_the_way_in_and_outputs_on_the_way_out() -> None:
    group = world()
    full = torch.linspace(-1, 1, 10).view(5, 2)
    spec = TensorSpec(shape=(5, 2), dtype=torch.bfloat16)
    layout = Layout([spec], group.size())
    in_flight = foreach_all_gather(shards_of([full], [spec], group), layout, gather_config(group))
    assert buffer_of(in_flight).dtype is torch.bfloat16
    output = torch.empty(5, 2)
    foreach_all_gather_copy_out(in_flight, [output])
    assert torch.equal(output, full.bfloat16().float())


@distributed(2)
def test_outputs_may_be_flat_may_require_grad_and_are_filled_exactly() -> None:
    group = world()
    specs = SPECS[:2]
    fulls = fulls_of(specs)
    layout = Layout(specs, group.size())
    in_flight = foreach_all_gather(shards_of(fulls, specs, group), layout, gather_config(group))
    room = torch.full((17,), -7.0)
    leaf = torch.empty((), dtype=torch.float64, requires_grad=True)
    foreach_all_gather_copy_out(in_flight, [room[1:16], leaf])
    assert torch.equal(room[1:16].view(5, 3), fulls[0])
    assert room[0].item() == room[16].item() == -7.0
    assert torch.equal(leaf.detach(), fulls[1])
    assert leaf.is_leaf


class _InputNoter(Allocates):
    """Notes whether the input lies inside the output."""

    def __init__(self) -> None:
        self.offsets: list[int] = []

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> None:
        self.offsets.append(input_tensor.data_ptr() - output_tensor.data_ptr())


def test_the_input_is_the_ranks_own_slice_of_the_output() -> None:
    layout = Layout(SPECS, 4)
    comm = _InputNoter()
    for rank in range(4):
        group = group_of(rank, 4)
        shards = shards_of(fulls_of(SPECS), SPECS, group)
        foreach_all_gather(shards, layout, gather_config(group, comm)).discard()
    assert comm.offsets == [rank * layout.buffer.slice_nbytes for rank in range(4)]


def test_no_collective_runs_for_tensors_without_elements() -> None:
    specs = [TensorSpec(shape=(0, 3), dtype=torch.float32)]
    comm = _InputNoter()
    config = gather_config(group_of(1, 2), comm)
    in_flight = foreach_all_gather([torch.empty(0, 3)], Layout(specs, 2), config)
    assert_gathered(in_flight, specs, [torch.empty(0, 3)])
    assert comm.offsets == []


def buffer_of(in_flight: AllGatherInFlight) -> torch.Tensor:
    """The one buffer of a gather that nobody claimed."""
    assert in_flight.buffer is not None
    return in_flight.buffer.tensor


def alone(comm: Any = None) -> AllGatherInFlight:
    group = group_of(0, 1)
    shards = shards_of(fulls_of(SPECS), SPECS, group)
    return foreach_all_gather(shards, Layout(SPECS, 1), gather_config(group, comm, name="blocks.0"))


def test_a_gather_is_claimed_once() -> None:
    in_flight = alone()
    in_flight.wait()
    in_flight.wait()
    assert_gathered(in_flight, SPECS, fulls_of(SPECS))
    with pytest.raises(RuntimeError, match=r"blocks\.0 was already copied out or discarded"):
        foreach_all_gather_copy_out(in_flight, empties(SPECS))
    with pytest.raises(RuntimeError, match="already"):
        in_flight.discard()


@pytest.mark.parametrize("claim", ["copy out", "discard"])
def test_a_claimed_gather_keeps_neither_buffers_nor_shards(claim: str) -> None:
    in_flight = alone()
    gone = weakref.ref(buffer_of(in_flight))
    shard = weakref.ref(in_flight.sources[0])
    if claim == "discard":
        in_flight.discard()
    else:
        foreach_all_gather_copy_out(in_flight, empties(SPECS))
    gc.collect()
    assert gone() is None
    assert shard() is None


def test_events_tell_of_the_three_steps_and_their_bytes() -> None:
    log = EventLog()
    with observe(log):
        foreach_all_gather_copy_out(alone(), empties(SPECS))
    nbytes = Layout(SPECS, 1).buffer.slice_nbytes
    told = [(event.kind, event.name, event.nbytes, event.stream) for event in log.events]
    assert told == [
        (EventKind.COPY_IN, "blocks.0", nbytes, "copy_in"),
        (EventKind.ALL_GATHER, "blocks.0", nbytes, "gather"),
        (EventKind.COPY_OUT, "blocks.0", sum(each.nbytes for each in empties(SPECS)), "current"),
    ]


@pytest.mark.parametrize("async_op", [False, True])
def test_on_an_accelerator_every_step_waits_for_what_it_needs_and_for_nothing_else(
    async_op: bool,
) -> None:
    specs = [TensorSpec(shape=(4,), dtype=torch.float32)]
    layout = Layout(specs, 1)
    with stand_in_accelerator() as (module, streams):
        config = gather_config(group_of(0, 1), AloneAllGather(module), streams=streams)
        wrote = module.work("optimizer")
        streams.synchronize_with_current()
        compute = streams.current()
        first = foreach_all_gather([torch.ones(4)], layout, config, async_op=async_op)
        layer = module.work("layer")
        second = foreach_all_gather([torch.ones(4)], layout, config, async_op=async_op)
        gathers = module.named("collective")
        copies_in = module.named("copy")
        for in_flight in (first, second):
            foreach_all_gather_copy_out(in_flight, empties(specs))
        copies_out = module.named("copy")[2:]
        third = foreach_all_gather([torch.ones(4)], layout, config, async_op=async_op)
        third.discard()
    for copy_in, gather, copy_out in zip(copies_in, gathers, copies_out, strict=True):
        assert copy_in.stream is streams.copy_in
        assert gather.stream is streams.gather
        assert copy_out.stream is compute
        assert copy_in.is_after(wrote)
        assert gather.is_after(copy_in)
        assert copy_out.is_after(gather)
    assert not gathers[1].is_after(layer)  # the prefetched gather runs beside the layer
    decodes = module.named("decode")
    assert len(decodes) == 3 * async_op
    assert all(step.stream is streams.gather for step in decodes)
    for copy_out, decode in zip(copies_out, decodes, strict=False):
        assert copy_out.is_after(decode)
    # The first two buffers went back to their owner before it allocated the third.
    assert all(module.named("allocate")[2].is_after(copy_out) for copy_out in copies_out)


def test_on_an_accelerator_a_gathers_buffer_goes_once_it_was_copied_out() -> None:
    specs = [TensorSpec(shape=(4,), dtype=torch.float32)]
    with stand_in_accelerator() as (module, streams):
        config = gather_config(group_of(0, 1), streams=streams)
        in_flight = foreach_all_gather([torch.ones(4)], Layout(specs, 1), config)
        buffer = weakref.ref(buffer_of(in_flight))
        outputs = empties(specs)
        foreach_all_gather_copy_out(in_flight, outputs)
        gc.collect()
        assert buffer() is None
    assert outputs[0].eq(1.0).all()
    assert len(module.named("copy")) == 2

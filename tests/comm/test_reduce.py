"""Reducing lists of gradients: equal to adding full gradients and cutting, whatever is missing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm.stand_ins import AloneReduceScatter, group_of, stand_in_accelerator
from fullshard.comm import (
    EventKind,
    EventLog,
    Layout,
    TensorSpec,
    foreach_reduce,
    observe,
    reduction_scaling,
)
from fullshard.comm.runtime.devices import DeviceTraits, simulated
from support.collectives import reduce_config, shard_of
from support.ranks import distributed, world

SHAPES = [((5, 3), 0), ((), 0), ((3, 7), 1), ((2, 9, 4), 1), ((0, 3), 0), ((1,), 0), ((8, 2), 0)]


def specs_of(dtype: torch.dtype) -> list[TensorSpec]:
    return [TensorSpec(shape=shape, dtype=dtype, dim=dim) for shape, dim in SHAPES]


def gradients_of(rank: int, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """Small whole numbers, so that every dtype adds them exactly; different on every rank."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(-8, 9, spec.shape, generator=generator).to(spec.dtype) for spec in specs]


def mean_over(world_size: int, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([each.double() for each in gradients]).sum(0) / world_size


@pytest.mark.cross
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
@distributed(2, 4)
def test_each_rank_gets_its_shard_of_the_mean(dtype: torch.dtype) -> None:
    group = world()
    rank, world_size = group.rank(), group.size()
    specs = specs_of(dtype)
    layout = Layout(specs, world_size)
    config = reduce_config(group, dtype=dtype)
    reduced = foreach_reduce(gradients_of(rank, specs), layout, config).wait()
    assert reduced.mask is None
    everyone = [gradients_of(each, specs) for each in range(world_size)]
    for index, (shard, spec) in enumerate(zip(reduced.shards, specs, strict=True)):
        mean = mean_over(world_size, [gradients[index] for gradients in everyone])
        assert shard.dtype is dtype
        # Exact: whole numbers divided by a power of two.
        assert torch.equal(shard.double(), shard_of(mean, spec, rank, world_size))


@distributed(2, 4)
def test_a_missing_gradient_counts_as_zero_and_the_mask_tells_whether_any_rank_had_it() -> None:
    group = world()
    rank, world_size = group.rank(), group.size()
    specs = [TensorSpec(shape=(5, 2), dtype=torch.float32)] * 4
    layout = Layout(specs, world_size, mask_numel=4)
    # All ranks have 0, only the last has 1, nobody has 2, all but rank 0 have 3.
    has = [True, rank == world_size - 1, False, rank != 0]
    gradients = [torch.ones(5, 2) if each else None for each in has]
    reduced = foreach_reduce(gradients, layout, reduce_config(group)).wait()
    assert reduced.mask is not None
    assert (reduced.mask > 0).tolist() == [True, True, False, True]
    assert reduced.mask.tolist() == [world_size, 1, 0, world_size - 1]
    for shard, count in zip(reduced.shards, [world_size, 1, 0, world_size - 1], strict=True):
        assert torch.equal(shard, torch.full_like(shard, count / world_size))


@distributed(2)
def test_between_ranks_of_one_host_gradients_go_as_soon_as_every_rank_has_come() -> None:
    """Nor is there memory for the result before: a reduction that waits for a rank needs none."""
    group = world()
    layout = Layout([TensorSpec(shape=(4, 3), dtype=torch.float32)], 2)
    config, last = reduce_config(group), group.rank() == 1
    if last:
        dist.barrier(group)
    gradient = torch.ones(4, 3)
    alive = weakref.ref(gradient)
    flight = foreach_reduce([gradient], layout, config)
    del gradient
    assert hasattr(flight, "output") is (alive() is None) is last
    if not last:
        dist.barrier(group)
    (shard,) = flight.wait().shards
    assert alive() is None
    assert torch.equal(shard, torch.ones(2, 3))


@distributed(2)
def test_gradients_are_cast_to_the_reduce_dtype_and_may_have_any_strides() -> None:
    group = world()
    spec = TensorSpec(shape=(4, 3), dtype=torch.float32, dim=1)
    layout = Layout([spec], 2)
    full = torch.arange(12, dtype=torch.bfloat16).view(3, 4).t()
    expanded = torch.ones((), dtype=torch.bfloat16).expand(4, 3)
    for gradient in (full, expanded):
        (shard,) = foreach_reduce([gradient], layout, reduce_config(group)).wait().shards
        assert torch.equal(shard, shard_of(gradient.float(), spec, group.rank(), 2))


@distributed(2)
def test_waiting_twice_gives_the_same_result_scaled_once() -> None:
    group = world()
    layout = Layout([TensorSpec(shape=(4,), dtype=torch.float32)], 2)
    in_flight = foreach_reduce([torch.ones(4)], layout, reduce_config(group))
    assert in_flight.work is not None
    first = in_flight.wait()
    assert in_flight.wait() is first
    assert first.shards[0].tolist() == [1.0, 1.0]
    assert in_flight.packed is None


class _EveryRankAlike:
    """A reduction over any number of ranks that all have this rank's gradients."""

    def __init__(self) -> None:
        self.inputs: list[torch.Tensor] = []

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.full(tuple(size), float("nan"), dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self.inputs.append(input_tensor.clone())
        own = input_tensor.chunk(group.size())[group.rank()]
        output_tensor.zero_()
        for _ in range(group.size()):
            output_tensor.add_(own)


def test_an_fp32_gradient_beyond_fp16_overflows_neither_in_the_cast_nor_in_the_sum() -> None:
    """Of 256 numbers over 128 ranks, which all have this gradient; masks are not scaled."""
    layout = Layout([TensorSpec(shape=(256,), dtype=torch.float16)], 128, mask_numel=1)
    scaling = reduction_scaling(128, torch.float16, averages=False, divide_factor=2.0**20)
    config = reduce_config(group_of(5, 128), _EveryRankAlike(), scaling)
    gradient = torch.full((256,), 2.0**17)  # fp16 ends below 2 ** 16
    reduced = foreach_reduce([gradient], layout, config).wait()
    assert reduced.shards[0].tolist() == [16.0, 16.0]  # 128 * 2 ** 17 / 2 ** 20
    assert reduced.mask is not None and reduced.mask.item() == 128.0


def test_one_rank_reduces_with_itself() -> None:
    specs = specs_of(torch.float32)
    gradients = gradients_of(0, specs)
    in_flight = foreach_reduce(gradients, Layout(specs, 1), reduce_config(group_of(0, 1)))
    shards = in_flight.wait().shards
    for shard, gradient, spec in zip(shards, gradients, specs, strict=True):
        assert torch.equal(shard, gradient.view(spec.laid_shape))


def test_events_tell_of_the_packing_and_the_collective_and_their_bytes() -> None:
    specs = specs_of(torch.float32)
    layout = Layout(specs, 4)
    log = EventLog()
    with observe(log):
        config = reduce_config(group_of(2, 4), _EveryRankAlike())
        foreach_reduce(gradients_of(0, specs), layout, config).wait()
    nbytes = layout.buffer.slice_nbytes * 4
    told = [
        (event.kind, event.name, event.rank, event.nbytes, event.stream) for event in log.events
    ]
    assert told == [
        (EventKind.COPY_IN, "blocks.0", 2, nbytes, "current"),
        (EventKind.REDUCE_SCATTER, "blocks.0", 2, nbytes, "reduce"),
    ]


def test_on_an_accelerator_the_collective_runs_beside_the_next_packing() -> None:
    specs = [TensorSpec(shape=(4,), dtype=torch.float32)]
    layout = Layout(specs, 1)
    scaling = reduction_scaling(1, torch.float32, averages=False, divide_factor=2.0)
    with stand_in_accelerator() as (module, streams):
        comm = AloneReduceScatter(module)
        config = reduce_config(group_of(0, 1), comm, scaling, streams=streams)
        compute = streams.current()
        flights = [foreach_reduce([torch.ones(4)], layout, config) for _ in range(3)]
        assert all(flight.work is None for flight in flights)
        packs, collectives = module.named("copy"), module.named("collective")
        for flight in flights:
            (shard,) = flight.wait().shards
            assert shard.tolist() == [0.5] * 4
        optimizer = module.work("optimizer")
    for pack, collective in zip(packs, collectives, strict=True):
        assert pack.stream is compute
        assert collective.stream is streams.reduce
        assert collective.is_after(pack)
        assert optimizer.is_after(collective)
    assert not packs[1].is_after(collectives[0])  # one input travels while the next is packed
    assert packs[2].is_after(collectives[0])  # and no more than that are alive


@pytest.mark.parametrize("inputs", [1, 2])
def test_on_an_accelerator_inputs_live_as_long_as_others_may_be_alive(inputs: int) -> None:
    specs = [TensorSpec(shape=(4,), dtype=torch.float32)]
    kept: list[weakref.ref[torch.Tensor]] = []

    class Noting(_EveryRankAlike):
        def __call__(self, output_tensor: Any, input_tensor: Any, *args: Any, **more: Any) -> None:
            kept.append(weakref.ref(input_tensor))
            output_tensor.copy_(input_tensor)

    with stand_in_accelerator() as (_, streams):
        options: dict[str, Any] = {"streams": streams, "inputs_in_flight": inputs}
        config = reduce_config(group_of(0, 1), Noting(), **options)
        layout = Layout(specs, 1)
        flights = [foreach_reduce([torch.ones(4)], layout, config) for _ in range(3)]
        gc.collect()
        assert [each() is not None for each in kept] == [False, False, inputs == 2]
        streams.collect_all()
        gc.collect()
        assert kept[2]() is None
    assert all(flight.wait().shards[0].eq(1.0).all() for flight in flights)


@pytest.mark.parametrize("over", [False, True])
def test_on_a_device_with_one_queue_an_input_lives_until_its_collective_is_over(over: bool) -> None:
    kept: list[weakref.ref[torch.Tensor]] = []

    class Handle(dist.Work):
        def is_completed(self) -> bool:
            return over

        def wait(self, timeout: object = None) -> bool:
            return True

    class Noting(_EveryRankAlike):
        def __call__(self, output_tensor: Any, input_tensor: Any, *args: Any, **more: Any) -> Any:
            kept.append(weakref.ref(input_tensor))
            output_tensor.copy_(input_tensor)
            return Handle()

    with simulated("cpu", DeviceTraits(streams=False, numbered=False)):
        config = reduce_config(group_of(0, 1), Noting())
        layout = Layout([TensorSpec(shape=(4,), dtype=torch.float32)], 1)
        flight = foreach_reduce([torch.ones(4)], layout, config)
        gc.collect()
        assert (kept[0]() is None) == over
        assert flight.wait().shards[0].eq(1.0).all()
        gc.collect()
        assert kept[0]() is None

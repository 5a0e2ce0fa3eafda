"""The pool of buffers: the same few blocks again and again, and never two users of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard.comm import (
    AllGather,
    BufferPool,
    CommStreams,
    DefaultAllGather,
    Layout,
    TensorSpec,
    default_reduce_scatter,
    foreach_all_gather,
    foreach_all_gather_copy_out,
    foreach_reduce,
)
from fullshard.comm.buffers.buffers import Buffer, BufferSource
from fullshard.comm.collectives.gather import FullTensors, OwnShards
from fullshard.comm.transports.collective import Collective
from support.collectives import gather_config, reduce_config
from support.ranks import distributed, world

CPU = torch.device("cpu")
SMALL = Layout([TensorSpec(shape=(4, 3), dtype=torch.float32)], 2)
LARGE = Layout([TensorSpec(shape=(50, 3), dtype=torch.bfloat16)], 2, mask_numel=1)
MIXED = Layout(
    [TensorSpec(shape=(5, 2), dtype=torch.float32), TensorSpec(shape=(7,), dtype=torch.int64)], 2
)


def take(pool: BufferPool, layout: Layout, comm: Any = None) -> Buffer:
    return pool.take(Collective(DefaultAllGather()) if comm is None else comm, layout, 0, CPU)


def give_back(pool: BufferPool, buffer: Buffer) -> None:
    streams = CommStreams.shared(CPU)
    pool.release(buffer, streams, streams.copy_in)


def address(buffer: Buffer) -> int:
    return buffer.tensor.untyped_storage().data_ptr()


def test_buffers_that_were_given_back_are_handed_out_again_with_their_views() -> None:
    pool = BufferPool()
    first = take(pool, SMALL)
    views = first.shards, first.pieces, first.gaps
    assert pool.nbytes == 0
    give_back(pool, first)
    again = take(pool, SMALL)
    assert again is first
    assert (again.shards, again.pieces, again.gaps) == views


def test_buffers_in_use_are_nobody_elses() -> None:
    pool = BufferPool()
    first, second = take(pool, SMALL), take(pool, SMALL)
    assert address(first) != address(second)
    give_back(pool, first)
    assert address(take(pool, SMALL)) == address(first)


def test_a_layout_gets_the_smallest_block_that_holds_it() -> None:
    pool = BufferPool()
    large, small = take(pool, LARGE), take(pool, SMALL)
    for each in (large, small):
        give_back(pool, each)
    assert address(take(pool, SMALL)) == address(small)
    assert address(take(pool, SMALL)) == address(large)


def test_a_block_that_is_too_small_makes_room_for_one_that_is_not() -> None:
    pool = BufferPool()
    give_back(pool, take(pool, SMALL))
    large = take(pool, LARGE)
    assert large.tensor.numel() == LARGE.buffer.slice_numel * 2
    give_back(pool, large)
    assert address(take(pool, SMALL)) == address(large), "there is one block"
    assert pool.nbytes == 0


@pytest.mark.parametrize("layout", [SMALL, MIXED], ids=["one dtype", "mixed"])
def test_memory_that_was_first_used_in_inference_mode_serves_training_too(
    layout: Layout,
) -> None:
    pool = BufferPool()
    with torch.inference_mode():
        buffer = take(pool, layout)
        for view in (buffer.slice, *buffer.shards, *buffer.pieces[0]):
            view.fill_(1)
    give_back(pool, buffer)
    again = take(pool, layout)
    for view in (again.tensor, again.slice, *again.shards, *again.pieces[0]):
        assert not view.is_inference()
        view.fill_(2)


def test_the_views_of_a_block_that_went_are_not_kept() -> None:
    pool = BufferPool()
    give_back(pool, take(pool, SMALL))
    give_back(pool, take(pool, LARGE))
    small = take(pool, SMALL)
    assert small.tensor.untyped_storage().nbytes() >= LARGE.buffer.slice_nbytes * 2
    small.tensor.fill_(1)  # its memory is there
    assert small.pieces[0][0].eq(1).all()


class _Own(AllGather):
    """One of a user's, that says nothing about reuse."""

    def __init__(self) -> None:
        self.asked = 0

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        self.asked += 1
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(self, *args: Any, **kwargs: Any) -> None:  # never called
        raise NotImplementedError


def test_a_collective_that_says_nothing_about_reuse_is_asked_each_time() -> None:
    pool, comm = BufferPool(), _Own()
    for _ in range(3):
        give_back(pool, take(pool, SMALL, Collective(comm)))
    assert comm.asked == 3
    assert pool.nbytes == 0


def test_only_memory_of_the_caching_allocator_is_reusable() -> None:
    class Elsewhere:
        def empty(self, size: Any, *, dtype: Any, device: Any) -> torch.Tensor:
            return torch.empty(tuple(size), dtype=dtype, device=device)

    assert Collective(DefaultAllGather()).reusable
    assert not Collective(DefaultAllGather(allocator=Elsewhere())).reusable


def _gathered(layout: Layout, source: Any, step: int) -> list[torch.Tensor]:
    rank, config = dist.get_rank(), gather_config(world(), source=source)
    shards = [
        torch.full(spec.shard_shape(rank, 2), 10 * step + rank).to(spec.dtype)
        for spec in layout.specs
    ]
    outputs = [torch.empty(spec.shape, dtype=spec.dtype) for spec in layout.specs]
    in_flight = foreach_all_gather(shards, layout, config)
    FullTensors(outputs, layout, config).fill(in_flight)
    return outputs


def _reduced(layout: Layout, source: Any, step: int) -> list[torch.Tensor]:
    dtype, comm = layout.buffer.dtype, default_reduce_scatter(world())
    config = reduce_config(world(), comm, dtype=dtype, source=source)
    gradients = [
        torch.full(spec.shape, step + dist.get_rank()).to(spec.dtype) for spec in layout.specs
    ]
    return foreach_reduce(gradients, layout, config).wait().shards


@distributed(2)
def test_layouts_that_share_memory_one_after_the_other_do_not_mix() -> None:
    pool = BufferPool()
    kept = []
    for step in range(3):
        for layout in (SMALL, MIXED, LARGE):
            got = _gathered(layout, pool, step)
            assert all(map(torch.equal, got, _gathered(layout, BufferSource(), step)))
        for layout in (LARGE, SMALL):
            got = _reduced(layout, pool, step)
            assert all(map(torch.equal, got, _reduced(layout, BufferSource(), step)))
            kept.append((got, [shard.clone() for shard in got]))
    for got, copies in kept:
        assert all(map(torch.equal, got, copies)), "results are nobody's block"


@distributed(2)
def test_own_shards_are_gathered_as_they_are_at_each_gather() -> None:
    config, shard, full = gather_config(world()), torch.zeros(2, 3), torch.empty(4, 3)
    own = OwnShards([shard], SMALL, config)
    for step in range(2):
        shard.fill_(step)
        foreach_all_gather_copy_out(own.gather(config), [full])
        assert full.eq(step).all()

"""When few ranks hold all of a layout, and the collectives over gloo that serve them then."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fullshard.comm import (
    DefaultReduceScatter,
    ExchangeTransport,
    NarrowTransport,
    ProcessGroupTransport,
    RankMajorLayout,
    SharedMemoryTransport,
    TensorSpec,
    default_all_gather,
    default_reduce_scatter,
    few_ranks,
    narrow_transport_of,
    set_shared_memory,
)
from fullshard.comm.transports.rank_order import reduce_in_rank_order
from support.ranks import distributed

CPU = torch.device("cpu")
TRANSPORTS = [ProcessGroupTransport(), ExchangeTransport()]


def _layout(world: int, *shapes: tuple[int, ...]) -> RankMajorLayout:
    return RankMajorLayout([TensorSpec(shape=each, dtype=torch.float32) for each in shapes], world)


@pytest.mark.parametrize(
    ("world", "shapes", "wanted"),
    [
        (7, [(1, 4)], 1),  # a broadcast takes 3 steps, a gather 6
        (6, [(1, 4)], 0),  # 3 of 5
        (1024, [(32, 32), (32,)], 32),
        (1024, [(51,)], 51),  # 510 of 1023
        (1024, [(52,)], 0),
        (1024, [(2048, 2), (3,)], 0),
        (1024, [(33, 2), (), (0, 5)], 33),
        (1024, [(0, 5)], 0),  # nobody holds anything, nobody moves anything
        (1, [(1, 4)], 0),
        (2, [(1, 4)], 0),
    ],
)
def test_ranks_are_few_where_broadcasts_take_half_the_steps(
    world: int, shapes: list[tuple[int, ...]], wanted: int
) -> None:
    assert few_ranks(_layout(world, *shapes)) == wanted


@given(
    world=st.integers(2, 2000),
    rows=st.lists(st.integers(0, 200), min_size=1, max_size=4),
)
def test_no_rank_beyond_the_few_holds_anything(world: int, rows: list[int]) -> None:
    layout = _layout(world, *((each, 2) for each in rows))
    few = few_ranks(layout)
    holding = [
        rank
        for rank in range(world)
        if any(math.prod(s.shard_shape(rank, world)) for s in layout.specs)
    ]
    if few:
        assert holding == list(range(few))
        assert 2 * few * math.log2(world) <= world
    else:
        assert not holding or 2 * len(holding) * math.ceil(math.log2(world)) >= world


def test_layouts_of_several_buffers_have_no_few_ranks() -> None:
    one = _layout(1024, (1, 4))
    several = mock.Mock(wraps=one, specs=one.specs, world_size=1024, buffers=one.buffers * 2)
    assert (few_ranks(one), few_ranks(several)) == (1, 0)


def _slices(ranks: int, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rank)
    whole = (torch.randn(ranks * 5, generator=generator) * 8).to(dtype)
    return whole.view(ranks, 5).unbind()


def _wait(works: tuple[dist.Work, ...], asynchronous: bool) -> None:
    assert bool(works) == asynchronous
    for work in works:
        work.wait()


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("transport", TRANSPORTS, ids=["own", "exchange"])
@distributed(4)
def test_gloo_brings_the_few_slices_to_all(
    transport: NarrowTransport, ranks: int, dtype: torch.dtype, asynchronous: bool
) -> None:
    group = dist.group.WORLD
    assert group is not None
    mine = _slices(ranks, group.rank(), dtype)
    _wait(transport.all_gather_narrow(mine, group, asynchronous), asynchronous)
    for rank, got in enumerate(mine):
        assert torch.equal(got, _slices(ranks, rank, dtype)[rank])


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("transport", TRANSPORTS, ids=["own", "exchange"])
@distributed(4)
def test_gloo_reduces_to_the_few_ranks(
    transport: NarrowTransport, ranks: int, dtype: torch.dtype, asynchronous: bool
) -> None:
    group = dist.group.WORLD
    assert group is not None
    rank = group.rank()
    for op, count in ((dist.ReduceOp.SUM, 3), (dist.ReduceOp.MAX, 0)):
        mine = _slices(ranks, rank, dtype)
        marks = torch.full((count,), float(rank == 3), dtype=dtype)
        _wait(transport.reduce_scatter_narrow(mine, marks, group, op, asynchronous), asynchronous)
        if rank >= ranks:
            assert marks.tolist() == [1.0] * count
        else:
            parts = [_slices(ranks, each, dtype)[rank] for each in range(4)]
            wanted = torch.empty(5, dtype=dtype)
            reduce_in_rank_order(parts, wanted, op)
            exact = isinstance(transport, ExchangeTransport) or op is dist.ReduceOp.MAX
            step = 0.0 if exact else 4 * torch.finfo(dtype).eps * 32
            torch.testing.assert_close(mine[rank], wanted, rtol=0, atol=step)


@distributed(2)
def test_an_exchange_refuses_what_it_cannot_reduce_before_anything_is_sent() -> None:
    group = dist.group.WORLD
    assert group is not None
    with pytest.raises(ValueError, match=r"average of torch\.int64"):
        slices, op = _slices(1, 0, torch.int64), dist.ReduceOp.AVG
        ExchangeTransport().reduce_scatter_narrow(slices, slices[0][:2], group, op, False)
    dist.barrier()


@distributed(2)
def test_who_moves_slices_of_few_ranks() -> None:
    """Not shared memory, where padding costs next to nothing; not gloo's own reductions: rings."""
    group = dist.group.WORLD
    assert group is not None
    few, many, cuda = _layout(64, (1, 4)), _layout(64, (64, 4)), torch.device("cuda", 0)
    own, exchange = ProcessGroupTransport(), ExchangeTransport()
    for comm in (default_all_gather(group), default_reduce_scatter(group)):
        reduces = isinstance(comm, DefaultReduceScatter)

        def found(layout: RankMajorLayout = few, device: torch.device = CPU) -> object:
            return narrow_transport_of(layout, comm, group, device, reduces=reduces)  # noqa: B023

        assert found() is None  # they share memory
        set_shared_memory(False)
        try:
            assert found() == (None if reduces else own)
        finally:
            set_shared_memory(True)
        comm.transport = SharedMemoryTransport()
        assert found() is None
        comm.transport = exchange
        assert found() == exchange
        assert found(many) is None
        assert found(device=cuda) is None

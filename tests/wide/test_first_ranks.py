"""What few of many ranks hold: collectives among all, against those of full width.

The ranks are threads. Their process group spoils what a reduction may spoil, and delivers only when
a rank waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.comm import (
    AllToAllTransport,
    BufferPool,
    CommStreams,
    DefaultAllGather,
    DefaultReduceScatter,
    EventKind,
    EventLog,
    Layout,
    ReducedShards,
    TensorSpec,
    all_gather_tensors,
    foreach_all_gather,
    foreach_all_gather_copy_out,
    foreach_reduce,
    observe,
    reduction_scaling,
)
from fullshard.comm.transports.first_ranks import for_first_ranks
from fullshard.comm.transports.transport import ProcessGroupTransport
from fullshard.sharding import FSDPModule, fully_shard
from support.collectives import gather_config, reduce_config
from support.modules import Assembled
from support.threads.ranks import ThreadRank, run_on_threads, seeded
from support.threads.world import run_program_on_threads
from support.wide.tensors import MIXED, BlockingStreams, OneStream, full_tensors, shards_of

CPU = torch.device("cpu")
EVEN = (((3, 4), 0), ((3,), 0), ((3, 2, 2), 0))  # the same three ranks hold a row of each
UNEVEN = (((3, 4), 0), ((2, 3), 1), ((1, 40), 0), ((), 0), ((0, 3), 0))  # most of it padding
TALL = (((66, 2), 0), ((33, 3), 0))  # of 32 ranks: three rows on the first 22
SHAPES = {"even": EVEN, "uneven": UNEVEN}
WORLDS = {32: 3, 128: 3}
STREAMS = [CommStreams, BlockingStreams, OneStream]


class _Wide:
    """No other way for what few ranks hold."""

    __slots__ = ()

    def narrow_gather(self, *given: object) -> None:
        """None."""

    narrow_reduce = narrow_gather


class _WideOwn(_Wide, ProcessGroupTransport):
    __slots__ = ()


class _WideAllToAll(_Wide, AllToAllTransport):
    __slots__ = ()


TRANSPORTS = [(ProcessGroupTransport(), _WideOwn()), (AllToAllTransport(), _WideAllToAll())]


def _specs(shapes: Sequence[Any], dtypes: Sequence[torch.dtype]) -> list[TensorSpec]:
    return [
        TensorSpec(shape=shape, dtype=dtypes[index % len(dtypes)], dim=dim)
        for index, (shape, dim) in enumerate(shapes)
    ]


def _nbytes(kind: EventKind, log: EventLog) -> list[int]:
    return [event.nbytes for event in log.events if event.kind is kind and event.rank == 9]


@pytest.mark.cross
@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("dtypes", [(torch.float32,), MIXED], ids=["fp32", "mixed"])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("world", WORLDS)
def test_what_few_ranks_hold_comes_to_all_of_them(
    world: int, shapes: Any, dtypes: Any, streams: type[CommStreams]
) -> None:
    specs = _specs(shapes, dtypes)
    layout = Layout(specs, world)
    few = for_first_ranks(layout)
    assert few is not None and few.world_size == WORLDS[world]
    fulls = [full_tensors(specs, number) for number in range(3)]

    def body(rank: ThreadRank) -> None:
        config = gather_config(rank.group, streams=streams(CPU), source=BufferPool())
        flights = [
            foreach_all_gather(shards_of(full, specs, rank.rank, world), layout, config)
            for full in fulls
        ]
        flights[1].discard()
        for number in (2, 0):
            outputs = [torch.full_like(each, 77) for each in fulls[number]]
            foreach_all_gather_copy_out(flights[number], outputs)
            assert all(map(torch.equal, outputs, fulls[number]))

    run_on_threads(body, world)


@pytest.mark.cross
@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("averages", [False, True], ids=["sum", "average"])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("transports", TRANSPORTS, ids=["own", "all-to-all"])
def test_reductions_to_few_ranks_are_those_to_all_to_the_bit(
    transports: Any, shapes: Any, averages: bool, dtype: torch.dtype, streams: type[CommStreams]
) -> None:
    """Also where a gradient is missing on some ranks or all, and where a result is filled again."""
    world = 32
    specs = _specs(shapes, (dtype,))
    layout = Layout(specs, world, mask_numel=len(specs))
    few = for_first_ranks(layout)
    assert few is not None and few.world_size == WORLDS[world]
    scaling = reduction_scaling(world, dtype, averages=averages)
    absent: tuple[dict[int, Sequence[int]], ...] = (
        {},
        {0: range(world), 1: range(1, world)},
        {},
        {1: (0, 5)},
    )

    def body(rank: ThreadRank) -> None:
        comms = [DefaultReduceScatter(transport=each) for each in transports]
        options: dict[str, Any] = {"streams": streams(CPU), "source": BufferPool()}
        narrow = reduce_config(rank.group, comms[0], scaling, **options)
        wide = reduce_config(rank.group, comms[1], scaling, source=BufferPool())
        into: ReducedShards | None = None
        for step, missing in enumerate(absent):
            gradients: list[torch.Tensor | None] = [*full_tensors(specs, rank.rank, step)]
            for index, ranks in missing.items():
                gradients[index] = None if rank.rank in ranks else gradients[index]
            into = foreach_reduce(gradients, layout, narrow).wait()
            other = foreach_reduce(gradients, layout, wide).wait()
            assert all(map(torch.equal, into.shards, other.shards))
            assert into.mask is not None and other.mask is not None
            expected = [len(missing.get(index, ())) < world for index in range(len(specs))]
            assert (into.mask > 0).tolist() == (other.mask > 0).tolist() == expected

    log = EventLog()
    with observe(log):
        run_on_threads(body, world)
    slice_nbytes = layout.buffer.slice_nbytes
    assert _nbytes(EventKind.REDUCE_SCATTER, log) == [3 * slice_nbytes, world * slice_nbytes] * 4


def test_several_reductions_in_flight_do_not_mix() -> None:
    specs = _specs(UNEVEN, (torch.float32,))
    layout = Layout(specs, 32, mask_numel=len(specs))

    def body(rank: ThreadRank) -> list[ReducedShards]:
        config = reduce_config(rank.group, source=BufferPool())
        flights = [
            foreach_reduce([torch.full(spec.shape, float(step)) for spec in specs], layout, config)
            for step in range(3)
        ]
        return [flight.wait() for flight in (flights[1], flights[0], flights[2])]

    for results in run_on_threads(lambda rank: (rank.rank, body(rank)), 32):
        rank, reduced = results
        for step, each in zip((1, 0, 2), reduced, strict=True):
            fulls = [torch.full(spec.shape, float(step)) for spec in specs]
            assert all(map(torch.equal, each.shards, shards_of(fulls, specs, rank, 32)))


def test_only_the_slices_of_those_ranks_travel_and_have_memory() -> None:
    specs = _specs(EVEN, (torch.float32,))
    gathered = Layout(specs, 32)
    reduced = Layout(specs, 32, mask_numel=len(specs))

    def body(rank: ThreadRank) -> tuple[int, int]:
        sources = BufferPool(), BufferPool()
        gather = gather_config(rank.group, source=sources[0])
        full = full_tensors(specs)
        shards = shards_of(full, specs, rank.rank, 32)
        foreach_all_gather_copy_out(foreach_all_gather(shards, gathered, gather), full)
        foreach_reduce(full, reduced, reduce_config(rank.group, source=sources[1])).wait()
        return sources[0].nbytes, sources[1].nbytes

    log = EventLog()
    with observe(log):
        held = set(run_on_threads(body, 32))
    slices = 3 * gathered.buffer.slice_nbytes, 3 * reduced.buffer.slice_nbytes
    assert _nbytes(EventKind.ALL_GATHER, log) == [slices[0]]
    assert _nbytes(EventKind.REDUCE_SCATTER, log) == [slices[1]]
    assert held == {slices}


class _Own(DefaultAllGather):
    """A collective that wants to be called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().__call__(*args, **kwargs)


class _OwnAllocator:
    """Gives zeros."""

    empty = staticmethod(torch.zeros)


def test_a_collective_or_allocator_of_a_users_own_sees_full_width() -> None:
    specs = _specs(EVEN, (torch.float32,))
    layout = Layout(specs, 32)
    whole = layout.buffer.slice_nbytes * 32

    def body(rank: ThreadRank) -> None:
        own = _Own()
        for comm in (own, DefaultAllGather(allocator=_OwnAllocator())):
            config = gather_config(rank.group, comm, source=BufferPool())
            full = full_tensors(specs)
            shards = shards_of(full, specs, rank.rank, 32)
            outputs = [torch.zeros_like(each) for each in full]
            foreach_all_gather_copy_out(foreach_all_gather(shards, layout, config), outputs)
            assert all(map(torch.equal, outputs, full))
        assert own.calls == 1

    log = EventLog()
    with observe(log):
        run_on_threads(body, 32)
    assert _nbytes(EventKind.ALL_GATHER, log) == [whole, whole]


def test_what_many_of_the_ranks_hold_travels_at_full_width() -> None:
    specs = _specs(TALL, (torch.float32,))
    assert for_first_ranks(Layout(specs, 32)) is None

    def body(rank: ThreadRank) -> None:
        full = full_tensors(specs)
        gathered = all_gather_tensors(shards_of(full, specs, rank.rank, 32), specs, rank.group)
        assert all(map(torch.equal, gathered, full))

    log = EventLog()
    with observe(log):
        run_on_threads(body, 32)
    whole = Layout(specs, 32).buffer.slice_nbytes * 32
    assert _nbytes(EventKind.ALL_GATHER, log) == [whole]


def _run(m: Any, x: torch.Tensor, *, middle: bool) -> torch.Tensor:
    """Shape: ``[batch, 3]``, in and out."""
    x = torch.tanh(m.first(x))
    x = x + m.middle(x) if middle else x
    out: torch.Tensor = m.last(x)
    return out


def _model() -> Any:
    """Layers of three rows each; the middle one is used by the ranks that say so."""
    layers = {name: nn.Linear(3, 3) for name in ("first", "middle", "last")}
    model = Assembled(_run, **layers, spare=nn.Parameter(torch.ones(3)))
    generator = seeded(5)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    return model


def _input(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, 3, generator=seeded(rank, step))


def _trained_alone(world: int) -> list[torch.Tensor]:
    """After three steps on all ranks' inputs, gradients added in rank order."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        totals: dict[nn.Parameter, torch.Tensor] = {}
        for rank in range(world):
            model(_input(rank, step), middle=rank % 2 == 0).square().sum().backward()
            for param in model.parameters():
                if param.grad is not None:
                    totals[param] = totals[param] + param.grad if param in totals else param.grad
                param.grad = None
        for param, total in totals.items():
            param.grad = total / world
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("shares", [True, False], ids=["shared-launches", "alone"])
def test_a_model_of_small_layers_trains_as_unsharded(shares: bool) -> None:
    world = 32
    wanted = run_on_threads(lambda rank: _trained_alone(world), 1)[0]

    def body(rank: ThreadRank) -> None:
        model = _model()
        for layer in (model.first, model.last, model):
            fully_shard(layer)
        assert isinstance(model, FSDPModule)
        if not shares:
            model.set_gather_bucket_cap(0)
            model.set_reduce_bucket_cap(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(3):
            model(_input(rank.rank, step), middle=rank.rank % 2 == 0).square().sum().backward()
            absent = [name for name, param in model.named_parameters() if param.grad is None]
            assert absent == ["spare"]
            optimizer.step()
            optimizer.zero_grad()
        for param, other in zip(model.parameters(), wanted, strict=True):
            assert isinstance(param, DTensor)
            torch.testing.assert_close(param.full_tensor(), other, rtol=1e-6, atol=1e-7)

    log = EventLog()
    with observe(log):
        run_program_on_threads(body, world)
    for kind in (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER):
        sizes = _nbytes(kind, log)
        assert sizes and max(sizes) < world * 16  # a slice of each rank has 16 bytes at least

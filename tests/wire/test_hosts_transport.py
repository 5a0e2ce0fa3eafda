"""Collectives by hosts: the sum in its stated order, to the last bit, whatever is drawn."""

from __future__ import annotations

import gc
import os
import socket
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.comm import (
    DefaultReduceScatter,
    Layout,
    PeerLostError,
    TensorSpec,
    default_reduce_scatter,
)
from fullshard.comm.transports.rank_order import reduce_in_rank_order
from fullshard.wire import HostsTransport, Quantised, WirePolicy
from fullshard.wire.turns import Turns
from support.collectives import Allocates, drawn_gradients, reduce_config, shard_of
from support.products import few
from support.ranks import RanksFailed, distributed, new_group, run_on_ranks, world
from support.threads.ranks import ThreadRank
from support.threads.world import run_program_on_threads

SUM, MEAN = dist.ReduceOp.SUM, dist.ReduceOp.AVG
shapes = st.sampled_from(
    [((5, 3), 0), ((), 0), ((3, 7), 1), ((2, 9, 4), 1), ((0, 3), 0), ((70,), 0)]
)
FORMS = (None, torch.bfloat16, torch.float16, Quantised(torch.int8, 16))


def drawn(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers whose sum depends on its order."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(numel, generator=generator) * 10.0 ** (rank % 4)).to(dtype)


def by_hosts(parts: Sequence[torch.Tensor], per_host: int, op: Any = SUM) -> torch.Tensor:
    """The definition: inside each host in rank order, then hosts in order."""
    firsts = range(0, len(parts), per_host)
    return in_order([in_order(parts[first : first + per_host], op) for first in firsts], op)


def in_order(parts: Sequence[torch.Tensor], op: Any = SUM) -> torch.Tensor:
    """The reduction of ``parts``, one after the other."""
    whole = torch.empty_like(parts[0])
    reduce_in_rank_order(parts, whole, op)
    return whole


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(shapes, st.sampled_from(FORMS)), min_size=1, max_size=4),
    st.integers(2, 4),
    st.integers(2, 3),
    st.integers(0, 999),
)
def test_a_reduction_is_the_sum_by_hosts_and_narrow_between_them_only(
    drawn: list[tuple[tuple[tuple[int, ...], int], Any]], hosts: int, per_host: int, seed: int
) -> None:
    ranks = hosts * per_host
    specs = [TensorSpec(shape=shape, dtype=torch.float32, dim=dim) for (shape, dim), _ in drawn]
    rules = [(str(index), form) for index, (_, form) in enumerate(drawn)]
    policy = WirePolicy(reduction_rules=rules, hosts=per_host)
    cpu = torch.device("cpu")
    forms = [policy.reduced_as(str(n), spec, ranks, cpu) for n, spec in enumerate(specs)]
    layout = Layout(specs, ranks, mask_numel=len(specs))
    everyones = [drawn_gradients(rank, specs, seed) for rank in range(ranks)]

    def body(rank: ThreadRank) -> tuple[list[torch.Tensor], torch.Tensor]:
        config = reduce_config(world(), default_reduce_scatter(world()))
        reduced = policy.reduction(layout, forms, config).launch(list(everyones[rank.rank])).wait()
        assert reduced.mask is not None
        return reduced.shards, reduced.mask

    for rank, (shards, mask) in enumerate(run_program_on_threads(body, ranks)):
        for index, (spec, form) in enumerate(zip(specs, forms, strict=True)):
            parts = []
            for of_rank in everyones:
                gradient = of_rank[index]
                whole = torch.zeros(spec.shape) if gradient is None else gradient
                parts.append(shard_of(whole, spec, rank, ranks).contiguous())
            totals = [in_order(parts[at : at + per_host]) for at in range(0, ranks, per_host)]
            wanted = in_order([form.rounded(each, rank).float() for each in totals])
            assert torch.equal(shards[index], wanted * (1 / ranks))
            used = any(of_rank[index] is not None for of_rank in everyones)
            assert bool(mask[index] > 0) is used


@pytest.mark.parametrize(("ranks", "per_host"), few([(128, 8), (96, 16)], (96, 16), together=True))
def test_in_a_wide_world_everybody_gets_everything(ranks: int, per_host: int) -> None:
    def body(rank: ThreadRank) -> tuple[torch.Tensor, torch.Tensor]:
        transport = HostsTransport(per_host)
        gathered, reduced = torch.empty(ranks * 3), torch.empty(3)
        transport.all_gather(gathered, drawn(rank.rank, 3), world(), False)
        transport.reduce_scatter(reduced, drawn(rank.rank, ranks * 3), world(), SUM, False)
        return gathered, reduced

    everyones = [drawn(rank, ranks * 3).split(3) for rank in range(ranks)]
    whole = torch.cat([drawn(rank, 3) for rank in range(ranks)])
    for rank, (gathered, reduced) in enumerate(run_program_on_threads(body, ranks)):
        assert torch.equal(gathered, whole)
        assert torch.equal(reduced, by_hosts([of[rank] for of in everyones], per_host))


# -- processes, which share memory inside a host and send messages between hosts ------------------


@pytest.mark.cross
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("op", [SUM, MEAN, dist.ReduceOp.MAX])
@distributed(4)
def test_reductions_add_by_hosts_to_the_last_bit(
    dtype: torch.dtype, op: Any, world_size: int
) -> None:
    rank, transport, numel = dist.get_rank(), HostsTransport(2), 50_001
    output = torch.empty(numel, dtype=dtype)
    given = drawn(rank, numel * world_size, dtype)
    everyones = [drawn(each, numel * world_size, dtype) for each in range(world_size)]
    parts = [each.view(world_size, -1)[rank].contiguous() for each in everyones]
    wanted = by_hosts(parts, 2, op)
    for async_op in (True, False, True):
        work = transport.reduce_scatter(output.fill_(-1), given, world(), op, async_op)
        assert (work is not None) is async_op
        if work is not None:
            work.wait()
        assert torch.equal(output, wanted)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@distributed(4)
def test_gathers_bring_what_each_rank_has(
    dtype: torch.dtype, in_place: bool, world_size: int
) -> None:
    rank, transport, numel = dist.get_rank(), HostsTransport(2), 4099
    whole = torch.cat([torch.arange(numel) * 7 + each for each in range(world_size)]).to(dtype)
    for async_op in (True, False, True):
        output = torch.zeros_like(whole)
        given = output.view(world_size, -1)[rank] if in_place else torch.empty(numel, dtype=dtype)
        given.copy_(whole.view(world_size, -1)[rank])
        work = transport.all_gather(output, given, world(), async_op)
        if work is not None:
            work.wait()
        assert torch.equal(output, whole)


@distributed(4)
def test_ranks_of_one_host_need_not_follow_one_another(world_size: int) -> None:
    """Ranks 0 and 2 are on one host, 1 and 3 on the other."""
    rank, transport = dist.get_rank(), HostsTransport("names")
    group = new_group()
    with patch.object(socket, "gethostname", lambda: f"host {rank % 2}"):
        gathered, reduced = torch.empty(world_size * 5), torch.empty(5)
        work = transport.all_gather(gathered, drawn(rank, 5), group, True)
        transport.reduce_scatter(reduced, drawn(rank, world_size * 5), group, SUM, False)
    assert work is not None
    work.wait()
    assert torch.equal(gathered, torch.cat([drawn(each, 5) for each in range(world_size)]))
    parts = [drawn(each, world_size * 5).split(5)[rank] for each in (0, 2, 1, 3)]
    assert torch.equal(reduced, by_hosts(parts, 2))
    # The group stays: torch names groups by their number, and those of its levels are still there.


@distributed(4)
def test_ranks_may_wait_in_any_order_and_as_late_as_they_like(world_size: int) -> None:
    """Nobody's collective goes on only once somebody else has waited for his."""
    rank, transport = dist.get_rank(), HostsTransport(2)
    gathers, reductions, works = [], [], []
    for each in range(4):
        gathers.append(torch.empty(world_size * 9))
        reductions.append(torch.empty(9))
        given = drawn(rank + each, 9), drawn(rank + each, world_size * 9)
        works += [
            transport.all_gather(gathers[-1], given[0], world(), True),
            transport.reduce_scatter(reductions[-1], given[1], world(), SUM, True),
        ]
    order = (
        (0, 1, 2, 3, 4, 5, 6, 7),
        (7, 6, 5, 4, 3, 2, 1, 0),
        (5, 0, 3, 6, 1, 4, 7, 2),
        (1, 3, 5, 7, 0, 2, 4, 6),
    )
    for place in order[rank]:
        work = works[place]
        assert work is not None
        work.wait()
        dist.barrier()  # all ranks have ended another collective
    for each in range(4):
        whole = torch.cat([drawn(other + each, 9) for other in range(world_size)])
        assert torch.equal(gathers[each], whole)
        parts = [drawn(other + each, world_size * 9).split(9)[rank] for other in range(world_size)]
        assert torch.equal(reductions[each], by_hosts(parts, 2))


def test_a_rank_that_ends_is_named_to_those_of_its_host() -> None:
    def body() -> str:
        rank, transport, output = dist.get_rank(), HostsTransport(2), torch.empty(3)
        transport.reduce_scatter(output, torch.ones(12), world(), SUM, False)
        if rank == 1:
            os._exit(3)
        try:
            transport.reduce_scatter(output, torch.ones(12), world(), SUM, False)
        except (PeerLostError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    with pytest.raises(RanksFailed) as failed:
        run_on_ranks(body, 4, fresh=True)
    assert "PeerLostError" in str(failed.value.results[0])
    assert "rank 1" in str(failed.value.results[0])


@distributed(2)
def test_on_one_host_it_does_what_the_automatic_transport_does() -> None:
    transport = HostsTransport(2)
    output = torch.empty(3)
    transport.reduce_scatter(output, torch.ones(6), world(), SUM, False)
    assert output.eq(2).all()


def test_bitwise_operations_have_no_two_levels() -> None:
    def body(rank: ThreadRank) -> None:
        with pytest.raises(ValueError, match="got the reduction"):
            HostsTransport(2).reduce_scatter(
                torch.empty(1), torch.empty(4), world(), dist.ReduceOp.BXOR, False
            )

    run_program_on_threads(body, 4)


def test_sizes_that_do_not_fit_are_an_error_and_nothing_is_moved_for_nothing() -> None:
    def body(rank: ThreadRank) -> None:
        transport, part = HostsTransport(2), torch.empty(3)
        with pytest.raises(ValueError, match="11 and 3 elements for 4 ranks"):
            transport.all_gather(torch.empty(11), part, world(), False)
        with pytest.raises(ValueError, match="13 and 3 elements for 4 ranks"):
            transport.reduce_scatter(part, torch.empty(13), world(), SUM, False)
        nothing = torch.empty(0)
        assert transport.all_gather(nothing, nothing, world(), True) is None
        assert transport.reduce_scatter(nothing, nothing, world(), SUM, True) is None

    run_program_on_threads(body, 4)


def test_a_reduce_scatter_of_a_users_own_is_used_as_it_is() -> None:
    class Own(Allocates, DefaultReduceScatter):
        """A subclass may mean anything by its call."""

    def body(rank: ThreadRank) -> None:
        spec = TensorSpec(shape=(4,), dtype=torch.float32)
        layout, config = Layout([spec], 4), reduce_config(world(), Own())
        assert WirePolicy(hosts=2).reduction(layout, [spec], config).config.comm is config.comm

    run_program_on_threads(body, 4)


# -- turns ----------------------------------------------------------------------------------------


def _wait(event: threading.Event) -> None:
    event.wait()


def _use(tensor: torch.Tensor) -> None:
    tensor.add_(1)


def test_turns_run_in_launch_order_and_an_error_is_his_who_waits() -> None:
    turns, ran = Turns(), list[int]()

    def failing() -> None:
        ran.append(1)
        raise ValueError("mine")

    works = [turns.launch(lambda: ran.append(0)), turns.launch(failing),
             turns.launch(lambda: ran.append(2))]  # fmt: skip
    works[2].wait()
    assert ran == [0, 1, 2]
    assert all(work.is_completed() for work in works)
    for _ in range(2):
        with pytest.raises(ValueError, match="mine"):
            works[1].wait()


def test_a_turn_waits_no_longer_than_it_is_told() -> None:
    turns, go = Turns(), threading.Event()
    work = turns.launch(partial(_wait, go))
    with pytest.raises(RuntimeError, match="not over"):
        work.wait(timedelta(milliseconds=1))
    go.set()
    assert work.wait()


def test_the_thread_ends_with_its_turns_and_keeps_nothing() -> None:
    turns, tensor = Turns(), torch.ones(3)
    turns.launch(partial(_use, tensor)).wait()
    gone = weakref.ref(tensor)
    threads = {each for each in threading.enumerate() if each.name == "fullshard hosts"}
    turns.launch(lambda: None).wait()
    del turns, tensor
    gc.collect()
    for thread in threads:
        thread.join(10)
    assert gone() is None

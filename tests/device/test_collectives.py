"""Collectives of the asynchronous device: as NCCL's in what they compute and what they order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.card import CARD, card
from support.device.pace import Pace, paced
from support.ranks import distributed

pytestmark = pytest.mark.device

# torch 2.13 renamed both, and warns of the names that it had before.
RENAMED = hasattr(dist, "all_gather_single")
gather_single = dist.all_gather_single if RENAMED else dist.all_gather_into_tensor
scatter_single = dist.reduce_scatter_single if RENAMED else dist.reduce_scatter_tensor

N = 6
LAZY = Pace(held=1.0)
STUCK = Pace(held=1.0, quiet_ms=60_000)  # even if another process keeps this one waiting


def _value(rank: int, numel: int = N) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float32) + 10 * rank


def _all(world_size: int, numel: int = N) -> torch.Tensor:
    return torch.stack([_value(rank, numel) for rank in range(world_size)])


def _mine(numel: int = N) -> torch.Tensor:
    return _value(dist.get_rank(), numel).to(CARD)


def _gather(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty(size, N, device=CARD)
    gather_single(out, _mine())
    return out, _all(size)


def _gather_list(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    out = [torch.empty(N, device=CARD) for _ in range(size)]
    dist.all_gather(out, _mine())
    return torch.stack(out), _all(size)


def _gather_to_one(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    first = dist.get_rank() == 0
    out = [torch.zeros(N, device=CARD) for _ in range(size)]
    dist.gather(_mine(), out if first else None, dst=0)
    return torch.stack(out), _all(size) if first else torch.zeros(size, N)


def _broadcast(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    out = _mine()
    dist.broadcast(out, src=1)
    return out, _value(1)


def _scatter(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty(N, device=CARD)
    given = [_value(rank).to(CARD) for rank in range(size)] if dist.get_rank() == 0 else None
    dist.scatter(out, given, src=0)
    return out, _value(dist.get_rank())


def _reduced(op: Any, expected: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def run(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        out = _mine()
        dist.all_reduce(out, op=op())
        return out, expected(_all(size))

    return run


def _scattered(op: Any, expected: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def run(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty(2, device=CARD)
        scatter_single(out, _mine(2 * size), op=op())
        return out, expected(_all(size, 2 * size)).chunk(size)[dist.get_rank()]

    return run


def _scatter_list(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty(2, device=CARD)
    dist.reduce_scatter(out, list(_mine(2 * size).chunk(size)))
    return out, _all(size, 2 * size).sum(0).chunk(size)[dist.get_rank()]


def _to_all(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty(size, device=CARD)
    dist.all_to_all_single(out, _mine(size))
    return out, _all(size, size)[:, dist.get_rank()]


def _to_all_uneven(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    rank = dist.get_rank()
    rows = [[1 + (a + b) % 2 for b in range(size)] for a in range(size)]  # from a to b
    given, taken = rows[rank], [row[rank] for row in rows]
    out = torch.empty(sum(taken), device=CARD)
    dist.all_to_all_single(out, _mine(sum(given)), taken, given)
    parts = [_value(a, sum(rows[a])).split(rows[a])[rank] for a in range(size)]
    return out, torch.cat(parts)


def _to_all_list(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    out = [torch.empty(1, device=CARD) for _ in range(size)]
    dist.all_to_all(out, list(_mine(size).chunk(size)))
    return torch.cat(out), _all(size, size)[:, dist.get_rank()]


def _coalesced(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    outs = [torch.empty(size, N, device=CARD) for _ in range(3)]
    with dist._coalescing_manager(device=CARD, async_ops=True) as manager:
        for out in outs:
            gather_single(out, _mine())
    manager.wait()
    return torch.stack(outs), torch.stack([_all(size)] * 3)


def _coalesced_reductions(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    outs = [torch.empty(2, device=CARD) for _ in range(2)]
    with dist._coalescing_manager(device=CARD):
        for out in outs:
            scatter_single(out, _mine(2 * size), op=dist.ReduceOp.AVG)
    part = _all(size, 2 * size).mean(0).chunk(size)[dist.get_rank()]
    return torch.stack(outs), torch.stack([part] * 2)


def _ring(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    rank, out = dist.get_rank(), torch.empty(100_000, device=CARD)
    sent = torch.full_like(out, float(rank))
    sides = [
        dist.P2POp(dist.isend, sent, (rank + 1) % size),
        dist.P2POp(dist.irecv, out, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(sides):
        work.wait()
    return out, torch.full((100_000,), float((rank - 1) % size))


def _sum(all_of: torch.Tensor) -> torch.Tensor:
    return all_of.sum(0)


def _mean(all_of: torch.Tensor) -> torch.Tensor:
    return all_of.mean(0)


CALLS: dict[str, Callable[[int], tuple[torch.Tensor, torch.Tensor]]] = {
    "all_gather_into_tensor": _gather,
    "all_gather": _gather_list,
    "gather": _gather_to_one,
    "broadcast": _broadcast,
    "scatter": _scatter,
    "all_reduce": _reduced(lambda: dist.ReduceOp.SUM, _sum),
    "all_reduce to the mean": _reduced(lambda: dist.ReduceOp.AVG, _mean),
    "all_reduce of products": _reduced(
        lambda: dist._make_nccl_premul_sum(0.5), lambda each: each.sum(0) / 2
    ),
    "all_reduce to the largest": _reduced(lambda: dist.ReduceOp.MAX, lambda each: each.amax(0)),
    "reduce_scatter_tensor": _scattered(lambda: dist.ReduceOp.SUM, _sum),
    "reduce_scatter_tensor to the mean": _scattered(lambda: dist.ReduceOp.AVG, _mean),
    "reduce_scatter_tensor of products": _scattered(
        lambda: dist._make_nccl_premul_sum(torch.full((1,), 2.0, device=CARD)),
        lambda each: each.sum(0) * 2,
    ),
    "reduce_scatter": _scatter_list,
    "all_to_all_single": _to_all,
    "all_to_all_single uneven": _to_all_uneven,
    "all_to_all": _to_all_list,
    "coalesced": _coalesced,
    "coalesced reductions": _coalesced_reductions,
    "a ring of sends": _ring,
}


@pytest.mark.parametrize("name", CALLS)
@distributed(2, 4)
def test_a_collective_gives_what_it_is_defined_to_give(name: str, world_size: int) -> None:
    for pace in (Pace(), LAZY):
        with paced(pace):
            found, expected = CALLS[name](world_size)
            torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("waits", [True, False])
@distributed(2)
def test_only_a_wait_orders_a_collective_in_flight(waits: bool, world_size: int) -> None:
    card._sleep(1)
    given, out = _mine(), torch.zeros(world_size, N, device=CARD)
    card.synchronize()
    with paced(STUCK):
        work = gather_single(out, given, async_op=True)
        assert not work.is_completed()  # the host went on
        if waits:
            work.wait()
        seen = out + 0
        card.current_stream().synchronize()
        expected = _all(world_size) if waits else torch.zeros(world_size, N)
        assert torch.equal(seen.cpu(), expected)
        work.wait()


@distributed(2)
def test_a_dropped_handle_keeps_nothing_and_orders_nothing(world_size: int) -> None:
    out = torch.zeros(world_size, N, device=CARD)
    card.synchronize()
    with paced(STUCK):
        work = gather_single(out, _mine(), async_op=True)  # its input is gone
        kept = card.memory_allocated()
        del work
        assert card.memory_allocated() < kept
        seen = out + 0
        card.current_stream().synchronize()
        assert seen.eq(0).all().item()


@distributed(2)
def test_a_collective_waits_for_what_the_current_stream_holds(world_size: int) -> None:
    for async_op in (False, True):
        given = torch.zeros(N, device=CARD)
        out = torch.empty(world_size, N, device=CARD)
        card.synchronize()
        card._sleep(1)
        given.copy_(_mine())
        work = gather_single(out, given, async_op=async_op)
        if work is not None:
            work.wait()
        assert torch.equal(out.cpu(), _all(world_size))


@distributed(2)
def test_a_barrier_makes_the_host_wait_and_groups_have_collectives_of_their_own() -> None:
    group = dist.new_group([0, 1], backend="asyncgloo")
    out = torch.ones(3, device=CARD)
    with paced(LAZY):
        dist.barrier(group=group, device_ids=[0])
        dist.all_reduce(out, group=group)
        assert out.tolist() == [2.0] * 3
    dist.destroy_process_group(group)

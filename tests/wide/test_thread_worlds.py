"""The worlds of threads themselves: they behave as processes do, and nobody waits for ever."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from support.threads.group import RankLeftError, RanksDivergedError
from support.threads.ranks import ThreadRank, ThreadsFailed, run_on_threads
from support.threads.world import run_program_on_threads

WORLD = 128


def _value(rank: int) -> torch.Tensor:
    return torch.tensor([1.0, rank])


def test_128_threads_gather_reduce_exchange_and_broadcast() -> None:
    def body(rank: ThreadRank) -> None:
        everyone = torch.stack([_value(each) for each in range(WORLD)])
        gathered = [torch.zeros(2) for _ in range(WORLD)]
        dist.all_gather(gathered, _value(rank.rank), group=rank.group)
        assert torch.equal(torch.stack(gathered), everyone)
        for op, expected in (
            (dist.ReduceOp.SUM, everyone.sum(0)),
            (dist.ReduceOp.AVG, everyone.mean(0)),
            (dist.ReduceOp.MAX, everyone.amax(0)),
            (dist.ReduceOp.MIN, everyone.amin(0)),
        ):
            reduced = _value(rank.rank)
            dist.all_reduce(reduced, op, group=rank.group)
            assert torch.equal(reduced, expected)
        exchanged = torch.zeros(WORLD)
        dist.all_to_all_single(
            exchanged, torch.arange(WORLD) + 1000.0 * rank.rank, group=rank.group
        )
        assert torch.equal(exchanged, 1000.0 * torch.arange(WORLD) + rank.rank)
        received = _value(rank.rank)
        rank.group.broadcast([received], _from(5)).wait()
        assert torch.equal(received, _value(5))
        assert (rank.group.rank(), rank.group.size()) == (rank.rank, WORLD)

    run_on_threads(body, WORLD)


def _from(root: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = root
    return options


def test_sums_are_added_in_rank_order() -> None:
    """In fp32 1e8 swallows the 2 before it; where it meets -1e8 first, the sum is another."""
    values = [1.0, 1.0, 1e8, -1e8]

    def body(rank: ThreadRank) -> float:
        total = torch.tensor([values[rank.rank]])
        dist.all_reduce(total, group=rank.group)
        return total.item()

    for _ in range(5):  # threads come in another order each time
        assert run_on_threads(body, len(values)) == [0.0] * len(values)


def test_a_result_appears_in_wait_and_not_before() -> None:
    """A process group may be that late; one that is early would hide a missing ``wait()``."""

    def body(rank: ThreadRank) -> None:
        total = torch.ones(3)
        work = dist.all_reduce(total, group=rank.group, async_op=True)
        assert work is not None
        rank.group.barrier().wait()  # now every rank has called the first one
        assert total.eq(1).all()
        work.wait()
        assert total.eq(rank.world_size).all()
        total.zero_()
        work.wait()
        assert total.eq(0).all()

    run_on_threads(body, 8)


def test_a_rank_that_raises_ends_the_wait_of_all_others() -> None:
    def body(rank: ThreadRank) -> None:
        if rank.rank == 3:
            raise ValueError("no data")
        dist.all_reduce(torch.ones(3), group=rank.group)

    with pytest.raises(ThreadsFailed, match="1 of 128 ranks failed") as failure:
        run_on_threads(body, WORLD)
    assert list(failure.value.errors) == [3]
    assert "ValueError: no data" in str(failure.value)


def test_a_rank_that_ends_early_ends_the_wait_of_all_others() -> None:
    def body(rank: ThreadRank) -> None:
        for _ in range(2 if rank.rank == 3 else 3):
            dist.all_reduce(torch.ones(3), group=rank.group)

    with pytest.raises(ThreadsFailed, match=r"ranks \[3\] ended without it"):
        run_on_threads(body, 8)


def test_a_group_that_is_made_after_a_rank_ended_does_not_wait_for_it() -> None:
    def body(rank: ThreadRank) -> float:
        total = torch.ones(())
        if rank.rank < 3:
            with pytest.raises(RankLeftError, match=r"ranks \[3\] ended without it"):
                dist.all_reduce(total, group=rank.subgroup(4))
        elif rank.rank > 3:
            dist.all_reduce(total, group=rank.subgroup(4))
        return total.item()

    assert run_on_threads(body, 8) == [1.0] * 4 + [4.0] * 4


@pytest.mark.parametrize("difference", ["size", "dtype", "op", "call"])
def test_ranks_that_call_different_collectives_all_raise(difference: str) -> None:
    def body(rank: ThreadRank) -> None:
        odd = rank.rank == 5
        tensor = torch.ones(
            4 if odd and difference == "size" else 8,
            dtype=torch.float64 if odd and difference == "dtype" else torch.float32,
        )
        if odd and difference == "call":
            rank.group.barrier().wait()
        op = dist.ReduceOp.MAX if odd and difference == "op" else dist.ReduceOp.SUM
        dist.all_reduce(tensor, op, group=rank.group)

    with pytest.raises(ThreadsFailed) as failure:
        run_on_threads(body, 8)
    errors = failure.value.errors.values()
    assert len(errors) == 8
    assert all(isinstance(each, RanksDivergedError) for each in errors)


def test_each_thread_has_a_default_group_and_subgroups_of_its_own() -> None:
    def body(rank: ThreadRank) -> tuple[int, float, float]:
        everyone = torch.tensor([float(rank.rank)])
        dist.all_reduce(everyone)
        mesh = dist.init_device_mesh("cpu", (2, 4), mesh_dim_names=("outer", "inner"))
        inner = torch.tensor([float(rank.rank)])
        dist.all_reduce(inner, group=mesh.get_group("inner"))
        return dist.get_rank(), everyone.item(), inner.item()

    results = run_program_on_threads(body, 8)
    assert results == [(rank, 28.0, 6.0 if rank < 4 else 22.0) for rank in range(8)]
    assert not dist.is_initialized()

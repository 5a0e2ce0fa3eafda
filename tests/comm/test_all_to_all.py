"""All-to-all reduce-scatters, against sums by hand and the process group's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard.comm.runtime.works import SeveralWorks
from fullshard.comm.transports.all_to_all import all_to_all, exchange
from fullshard.comm.transports.rank_order import reduce_in_rank_order
from fullshard.samehost import AllToAllTransport
from support.ranks import distributed, world

ALL_TO_ALL = AllToAllTransport()


def given_by(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(numel, generator=generator) * 8).to(dtype)


@distributed(4)
def test_parts_are_added_in_rank_order_to_the_bit() -> None:
    rank, output, wanted = dist.get_rank(), torch.zeros(5), torch.zeros(5)
    given_in = given_by(rank, 20, torch.float32)
    ALL_TO_ALL.reduce_scatter(output, given_in, world(), dist.ReduceOp.SUM, False)
    reduce_in_rank_order(
        [given_by(each, 20, torch.float32)[5 * rank :][:5] for each in range(4)], wanted
    )
    assert torch.equal(output, wanted)


class _Recording:
    """A process group that notes what it is asked for; as rank 1 of 3."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 3

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        self.asked.append(("recv", peer, tensors[0].numel()))
        return SeveralWorks(())

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        self.asked.append(("send", peer, tensors[0].numel()))
        return SeveralWorks(())


def test_a_rank_asks_for_all_that_is_sent_to_it_before_it_sends() -> None:
    group: Any = _Recording()
    sent, arriving = torch.arange(6.0), torch.zeros(9)
    pieces = sent.split_with_sizes([1, 3, 2])
    exchange(pieces, arriving.view(3, 3).unbind(), group, True)
    asked = [(what, peer) for what, peer, _ in group.asked]
    assert asked == [("recv", 0), ("recv", 2), ("send", 2), ("send", 0)]
    assert [nbytes for _, _, nbytes in group.asked] == [12, 12, 8, 4]
    assert arriving.tolist() == [0, 0, 0, 1, 2, 3, 0, 0, 0]  # its own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool])
@distributed(2, 3, 4, matrix=[3])
def test_parts_of_any_size_arrive_in_the_order_of_their_launches(dtype: torch.dtype) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    flights = []
    for turn, numel in enumerate([3, 1, 0, 7]):
        mine = given_by(10 * turn + rank, size * numel, torch.float32).to(dtype)
        arrived = torch.zeros(size * numel, dtype=dtype)
        work = all_to_all(arrived, mine, world(), True)
        assert work is not None
        flights.append((work, arrived, turn))
    for work, arrived, turn in reversed(flights):
        work.wait()
        sent = [given_by(10 * turn + each, arrived.numel(), torch.float32) for each in range(size)]
        wanted = torch.cat([each.to(dtype).chunk(size)[rank] for each in sent])
        assert torch.equal(arrived.view(torch.uint8), wanted.view(torch.uint8))


@distributed(2)
def test_users_own_messages_do_not_meet_those_of_a_collective() -> None:
    rank = dist.get_rank()
    theirs = torch.zeros(4)
    if rank:
        receiving = dist.irecv(theirs, src=0)
    output = torch.zeros(4)
    work = ALL_TO_ALL.all_gather(output, torch.full((2,), float(rank)), world(), True)
    assert work is not None
    if rank == 0:
        dist.send(torch.full((4,), 7.0), dst=1)
    else:
        assert receiving is not None
        receiving.wait()
    work.wait()
    assert output.tolist() == [0, 0, 1, 1]
    assert theirs.tolist() == [7.0 * rank] * 4


@distributed(2)
def test_what_cannot_be_reduced_is_an_error_before_anything_is_sent() -> None:
    sum_ = dist.ReduceOp.SUM
    with pytest.raises(ValueError, match="an input of 5 elements and an output of 3 for 2 ranks"):
        ALL_TO_ALL.reduce_scatter(torch.zeros(3), torch.zeros(5), world(), sum_, False)
    with pytest.raises(ValueError, match=r"avg of torch\.int64"):
        whole = torch.zeros(4, dtype=torch.int64)
        ALL_TO_ALL.reduce_scatter(whole[:2], whole, world(), dist.ReduceOp.AVG, False)
    dist.barrier()

"""What serves ranks where nobody chose: shared memory on one host, else the process group's own."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from comm.stand_ins import no_larger_files_than
from fullshard.comm import (
    ProcessGroupTransport,
    SelfTransport,
    Transport,
    default_all_gather,
    default_reduce_scatter,
)
from fullshard.samehost import (
    AllToAllTransport,
    SharedMemoryError,
    SharedMemoryTransport,
    peers,
    same_host_transport,
    set_shared_memory,
)
from fullshard.samehost.automatic import AutomaticTransport
from fullshard.samehost.group import shared_group
from support.apart import private_memory
from support.ranks import distributed, new_group
from support.threads.ranks import ThreadRank, run_on_threads

SUM = dist.ReduceOp.SUM


def use(group: dist.ProcessGroup, numel: int = 3) -> None:
    """A gather and a reduction by the defaults, each right."""
    rank, size = group.rank(), group.size()
    output, total = torch.zeros(numel * size), torch.zeros(numel)
    works = [
        default_all_gather(group)(output, torch.full((numel,), 1.0 + rank), group, async_op=True),
        default_reduce_scatter(group)(
            total, torch.full((numel * size,), 1.0 + rank), group, SUM, async_op=True
        ),
    ]
    for work in works:
        if work is not None:
            work.wait()
    assert output[::numel].tolist() == [1.0 + each for each in range(size)]
    assert bool((total == size * (size + 1) / 2).all())


def shares(group: dist.ProcessGroup) -> int:
    """Collectives that went through the group's shared memory."""
    return shared_group(group).launched


@distributed(2, 4)
def test_the_defaults_share_memory_among_ranks_of_one_host() -> None:
    group = new_group()
    assert same_host_transport(group) == SharedMemoryTransport()
    assert default_all_gather(group).transport == AutomaticTransport()
    assert default_reduce_scatter(group).transport == AutomaticTransport()
    use(group)
    assert shares(group) == 2
    use(group)
    assert shares(group) == 4


@distributed(2)
def test_it_can_be_turned_off_and_on_again() -> None:
    group = new_group()
    use(group)
    set_shared_memory(False)
    try:
        use(group)
        assert shares(group) == 2
        output = torch.zeros(2)
        SharedMemoryTransport().all_gather(output, torch.ones(1), group, False)
        assert shares(group) == 3  # by name
    finally:
        set_shared_memory(True)
    use(group)
    assert shares(group) == 5


def test_the_switch_takes_a_bool() -> None:
    with pytest.raises(TypeError, match="enabled is 1, a int; pass True or False"):
        set_shared_memory(1)  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize(
    ("host", "why"),
    [("host {}", "ranks 0 and 1 are not on one host"), ("", "rank 0 has no memory")],
)
@distributed(2)
def test_ranks_that_cannot_share_memory_exchange_and_say_why_when_asked_not_to(
    host: str, why: str
) -> None:
    group = new_group()
    with patch.object(peers, "host_identity", lambda: host.format(dist.get_rank())):
        use(group)
        assert same_host_transport(group) == AllToAllTransport()
        with pytest.raises(SharedMemoryError, match=why):
            SharedMemoryTransport().all_gather(torch.zeros(2), torch.zeros(1), group, False)
    use(group)  # asked once


def test_ranks_that_are_threads_choose_their_process_group() -> None:
    def body(rank: ThreadRank) -> Transport:
        return same_host_transport(rank.group)

    assert run_on_threads(body, 3) == [ProcessGroupTransport()] * 3


@distributed(2)
def test_one_rank_needs_nobody() -> None:
    group = new_group([dist.get_rank()])
    assert same_host_transport(group) == default_all_gather(group).transport == SelfTransport()
    use(group)
    output = torch.zeros(2)
    SharedMemoryTransport().all_gather(output, torch.ones(2), group, False)
    assert output.all()


@distributed(2)
def test_what_has_no_room_goes_through_the_process_group_and_the_rest_does_not() -> None:
    group = new_group()
    use(group)
    with no_larger_files_than(2 << 20):
        use(group, 2_000_000)
        assert shares(group) == 2
        use(group)
        assert shares(group) == 4
    use(group, 2_000_000)
    assert shares(group) == 6


@pytest.mark.parametrize(
    ("op", "private", "shared"),
    [(SUM, False, True), (SUM, True, False), (dist.ReduceOp.BOR, False, False)],
)
@distributed(2)
def test_what_only_the_process_group_may_or_can_reduce_goes_through_it(
    op: dist.ReduceOp.RedOpType, private: bool, shared: bool
) -> None:
    group, transport, rank = new_group(), AutomaticTransport(), dist.get_rank()
    total, part = torch.tensor([1 << rank]), torch.zeros(1, dtype=torch.int64)
    before = shares(group)
    with private_memory() if private else nullcontext():
        transport.all_reduce(total, op, group, False)
        transport.reduce_scatter(part, torch.tensor([1, 2]) << rank, group, op, False)
    assert total.item() == 1 | 2
    assert part.item() == [1 | 2, 2 | 4][rank]
    assert shares(group) - before == 2 * shared


@distributed(2)
def test_choosing_communicates_nothing_before_the_first_collective() -> None:
    group = new_group()
    if dist.get_rank() == 0:
        default_all_gather(group)
        default_reduce_scatter(group)
    dist.barrier()
    use(group)

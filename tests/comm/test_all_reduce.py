"""A few numbers that all ranks reduce: through the memory they share, else as the group does it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from fullshard.comm import CollectiveMismatchError, EventKind, EventLog, observe
from fullshard.insight import debug_mode
from fullshard.optim.norm.all_reduce import all_reduce_numbers
from fullshard.samehost.automatic import AutomaticTransport
from fullshard.samehost.group import shared_group
from support.apart import private_memory
from support.ranks import distributed, new_group, world


def share(group: dist.ProcessGroup) -> None:
    """A first gather, with which ranks come to share memory."""
    own = torch.zeros(4)
    AutomaticTransport().all_gather(own.new_empty(4 * group.size()), own, group, False)


def groups_own(mode: CommDebugMode) -> int:
    """All-reduces that the process group itself made."""
    counts: dict[object, int] = mode.get_comm_counts()
    return sum(counts.values())


@distributed(2)
def test_what_is_not_contiguous_is_an_error_before_anything_is_sent() -> None:
    numbers = torch.zeros(2, 3).t()
    for _ in ("before ranks share memory", "after"):
        with CommDebugMode() as mode, pytest.raises(ValueError, match=r"a norm.*not contiguous"):
            all_reduce_numbers(numbers, world(), name="a norm")
        assert groups_own(mode) == 0
        share(world())


@pytest.mark.parametrize("op", ["SUM", "MAX", "MIN", "PRODUCT"])
@distributed(2)
def test_each_reduction_is_that_of_the_process_group(op: str) -> None:
    group, reduction = world(), getattr(dist.ReduceOp, op)
    share(group)
    for dtype in (torch.float64, torch.float32, torch.int64):
        for shape in ((), (2, 3)):  # of no dim, as a norm
            given = torch.full(shape, 3 + dist.get_rank(), dtype=dtype)
            mine, theirs = given.clone(), given.clone()
            all_reduce_numbers(mine, group, reduction)
            dist.all_reduce(theirs, reduction)
            assert torch.equal(mine, theirs)


@distributed(2)
def test_a_group_that_shares_nothing_yet_is_not_made_to_and_a_switch_holds() -> None:
    group = new_group()
    with CommDebugMode() as mode:
        all_reduce_numbers(torch.ones(1), group)
        share(group)
        with private_memory():
            all_reduce_numbers(torch.ones(1), group)
        all_reduce_numbers(torch.ones(1), group)
    assert groups_own(mode) >= 2  # and what set the memory up
    assert shared_group(group).launched == 2
    dist.destroy_process_group(group)


@distributed(2)
def test_it_is_an_event_and_debug_mode_compares_it() -> None:
    group, log = world(), EventLog()
    share(group)
    with observe(log):
        all_reduce_numbers(torch.ones(3), group, name="three numbers")
    (event,) = [each for each in log.events if each.kind is EventKind.ALL_REDUCE]
    assert (event.name, event.nbytes, event.rank) == ("three numbers", 12, dist.get_rank())
    with (
        pytest.raises(CollectiveMismatchError, match="three numbers"),
        debug_mode(timeout=20),
    ):
        numbers = torch.ones(3 if dist.get_rank() else 4)
        all_reduce_numbers(numbers, group, name="three numbers")
    mine = torch.ones(1)
    all_reduce_numbers(mine, group)  # nothing was launched, so it goes on
    assert mine.item() == 2

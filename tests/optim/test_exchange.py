"""An exchange of values of any number between ranks: through shared memory and without it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from fullshard.comm import (
    CollectiveMismatchError,
    EventKind,
    EventLog,
    PeerLostError,
    observe,
)
from fullshard.insight import debug_mode
from fullshard.optim.owners.exchange import ValueExchange
from fullshard.samehost import SharedMemoryTransport, set_shared_memory
from fullshard.samehost.group import shared_group
from fullshard.samehost.signals import MessageKind
from support.ranks import distributed

CPU = torch.device("cpu")


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def numels_of(world_size: int) -> dict[tuple[int, int], int]:
    """Rank r gives r + t + 1 values to rank t, and the last rank nothing to the first."""
    ranks = range(world_size)
    return {
        (giver, taker): giver + taker + 1
        for taker in reversed(ranks)
        for giver in ranks
        if giver != taker and (giver, taker) != (world_size - 1, 0)
    }


def fill(turn: int, memory: Mapping[int, torch.Tensor]) -> None:
    for to, values in memory.items():
        values.copy_(100 * turn + 10 * dist.get_rank() + to + torch.arange(values.numel()) / 4)


def keep(found: dict[int, torch.Tensor], memory: Mapping[int, torch.Tensor]) -> None:
    found.update({by: values.clone() for by, values in memory.items()})


def nothing(memory: Mapping[int, torch.Tensor]) -> None:
    """Reads or writes no value."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int16])
@pytest.mark.parametrize("shared", [True, False])
@distributed(2, 4, matrix=[4])
def test_each_rank_gets_what_each_other_one_gave_it(
    world_size: int, shared: bool, dtype: torch.dtype
) -> None:
    set_shared_memory(shared)
    try:
        rank, numels = dist.get_rank(), numels_of(world_size)
        exchange = ValueExchange(numels, dtype, CPU, world(), "values")
        with patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as moved:
            found: list[dict[int, torch.Tensor]] = [{} for _ in range(5)]
            flights = [
                exchange.launch(partial(fill, turn), partial(keep, to))
                for turn, to in enumerate(found)
            ]
            for flight in flights:
                flight.wait()
        assert moved.call_count == (0 if shared else 5)
        for turn, came in enumerate(found):
            assert sorted(came) == [giver for giver, taker in sorted(numels) if taker == rank]
            for giver, values in came.items():
                expected = 100 * turn + 10 * giver + rank + torch.arange(giver + rank + 1) / 4
                assert torch.equal(values, expected.to(dtype))
    finally:
        set_shared_memory(True)


@distributed(2)
def test_one_that_would_take_too_much_shared_memory_goes_through_the_process_group() -> None:
    exchange = ValueExchange({(0, 1): 5, (1, 0): 5}, torch.float32, CPU, world(), "values")
    before = shared_group(world()).launched
    with patch("fullshard.samehost.automatic._LARGEST_EXCHANGE", 39):
        exchange.launch(partial(fill, 0), nothing).wait()
    assert shared_group(world()).launched == before
    exchange.launch(partial(fill, 0), nothing).wait()
    assert shared_group(world()).launched == before + 1


@distributed(2)
def test_it_is_an_event_of_what_this_rank_gives_and_debug_mode_compares_it() -> None:
    rank, log = dist.get_rank(), EventLog()
    exchange = ValueExchange({(0, 1): 5, (1, 0): 7}, torch.float32, CPU, world(), "values")
    with debug_mode(timeout=20), observe(log):
        exchange.launch(partial(fill, 0), nothing).wait()
    (event,) = log.of(EventKind.ALL_TO_ALL)
    assert (event.name, event.nbytes) == ("values", 20 if rank == 0 else 28)


@distributed(2, fresh=True)
def test_another_size_on_another_rank_is_an_error_on_both() -> None:
    numel = 15 + dist.get_rank()
    exchange = ValueExchange({(0, 1): numel, (1, 0): numel}, torch.float32, CPU, world(), "values")
    with pytest.raises(CollectiveMismatchError, match=r"an exchange of 12[08] bytes"):
        exchange.launch(nothing, nothing).wait()


@distributed(2)
def test_the_error_of_a_lost_rank_says_what_was_exchanged() -> None:
    exchange = ValueExchange({(0, 1): 4, (1, 0): 4}, torch.float32, CPU, world(), "my values")
    lost = PeerLostError("Rank 1 has ended.", 1, MessageKind.ENDED)
    with (
        patch.object(SharedMemoryTransport, "exchange", side_effect=lost),
        pytest.raises(PeerLostError, match="in the exchange of my values"),
    ):
        exchange.launch(nothing, nothing)

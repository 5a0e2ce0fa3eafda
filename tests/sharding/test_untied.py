"""A tied parameter that is replaced in some of its places is an error; in all of them it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fullshard.sharding import fully_shard
from support.modules import in_turn
from support.parity.compare import assert_equal, parameters_of, rounding
from support.ranks import distributed


def _tied() -> Any:
    torch.manual_seed(0)
    net = in_turn(first=nn.Linear(4, 4), act=nn.Tanh(), last=nn.Linear(4, 4))
    net.last.weight = net.first.weight
    return net


def _sharded(*, apart: bool) -> Any:
    net = _tied()
    if apart:
        fully_shard(net.first)
    return fully_shard(net)


@pytest.mark.cross
@pytest.mark.parametrize("place", ["last", "first"])
@pytest.mark.parametrize("ran", [True, False])
@pytest.mark.parametrize("apart", [False, True])
@distributed(2)
def test_a_tied_parameter_that_is_replaced_in_one_place_is_an_error(
    place: str, ran: bool, apart: bool
) -> None:
    """The other places would keep the old one, or get the new one, without a word."""
    net = _sharded(apart=apart)
    if ran:
        net(torch.ones(2, 4)).sum().backward()
    getattr(net, place).weight = nn.Parameter(net.first.weight.detach().clone())
    with pytest.raises(ValueError, match=r"first\.weight is tied: 2 modules .* untie them before"):
        net(torch.ones(2, 4))


@distributed(2)
def test_a_tied_parameter_that_is_replaced_in_all_places_is_trained(world_size: int) -> None:
    net, whole = _sharded(apart=True), _tied()
    for step in range(3):
        for each in (net, whole):
            if step:
                each.first.weight = nn.Parameter(each.first.weight.detach() * 0.5)
                each.last.weight = each.first.weight
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            each(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    allowed = rounding(world_size, steps=3)
    assert_equal(parameters_of(net), parameters_of(whole), allowed, "parameters")

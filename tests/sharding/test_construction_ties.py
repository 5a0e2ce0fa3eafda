"""Parameters in several modules: tied in a group or across groups, and modules given as a list."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from fullshard.sharding import fully_shard
from support.ranks import distributed
from support.surface.model import build, train
from support.surface.ranks import full_parameters
from support.surface.ties import Tied


@pytest.mark.parametrize("groups", [[], ["embed"], ["embed", "first"], ["head"], ["embed", "head"]])
@distributed(2)
def test_tied_parameters_are_the_same_object_in_every_module_and_train_as_unsharded(
    groups: list[str],
) -> None:
    torch.manual_seed(0)
    net: Any = Tied()
    torch.manual_seed(0)
    reference: Any = Tied()
    for name in groups:
        fully_shard(getattr(net, name))
    fully_shard(net)

    def same() -> bool:
        return net.head.weight is net.embed.weight and net.first.weight is net.second.weight

    assert same()
    assert len(list(net.parameters())) == len(list(reference.parameters()))
    tokens = torch.tensor([0, 1, 4, 4])
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (net, reference)]
    for _ in range(3):
        for model, optimizer in zip((net, reference), optimizers, strict=True):
            model(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert same()
    # `embed` and `head` of the root see the same tensor in its forward, sharded or not
    assert all(net.seen[1::3])
    if not groups:
        assert all(net.seen)
    for name, value in full_parameters(net).items():
        torch.testing.assert_close(value, reference.get_parameter(name).detach())


@distributed(2)
def test_modules_tied_to_a_group_see_its_full_parameter_while_it_is_unsharded() -> None:
    net: Any = Tied()
    fully_shard(net.embed)
    fully_shard(net)
    net.embed.unshard()
    assert not isinstance(net.embed.weight, DTensor)
    assert net.head.weight is net.embed.weight
    net.embed.reshard()
    assert isinstance(net.head.weight, DTensor)
    assert net.head.weight is net.embed.weight


# -- a list of modules ----------------------------------------------------------------------------


@distributed(2)
def test_a_list_of_modules_trains_as_unsharded() -> None:
    reference, net = build(), build()
    fully_shard([net.stem, *net.blocks])
    fully_shard(net)
    ours, theirs = (torch.optim.AdamW(model.parameters(), lr=0.1) for model in (net, reference))
    torch.testing.assert_close(train(net, ours, range(3)), train(reference, theirs, range(3)))

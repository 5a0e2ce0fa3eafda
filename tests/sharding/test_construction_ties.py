"""Parameters in several modules: tied in a group or across groups, and modules given as a list."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.sharding import FSDPModule, fully_shard
from support.parity.compare import full
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


# -- methods of one module whose parameters others hold, too --------------------------------------


def _three_layers(bias: bool = True) -> Any:
    """The last has the weight of the first."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(4, 4, bias=bias) for _ in range(3)])
    net[2].weight = net[0].weight
    return net


def _assert_same_gradients(net: nn.Module, reference: nn.Module) -> None:
    for (name, ours), theirs in zip(net.named_parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) is (theirs.grad is None), name
        if ours.grad is not None and theirs.grad is not None:
            torch.testing.assert_close(full(ours.grad), theirs.grad, msg=name)


@pytest.mark.cross
@pytest.mark.parametrize("groups", [[[0, 1]], [[0], [1], [2]], [[0, 1, 2]]])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("kept", [False, True], ids=["sharded", "unsharded"])
@distributed(2)
def test_zero_grad_of_one_module_leaves_the_gradients_of_the_others(
    groups: list[list[int]], set_to_none: bool, kept: bool
) -> None:
    reference, net = _three_layers(), _three_layers()
    for places in groups:
        fully_shard([net[place] for place in places])
    fully_shard(net)
    sharded = [layer for layer in net if isinstance(layer, FSDPModule)]
    for layer in sharded:
        for model in (reference, net):
            model(torch.ones(2, 4)).square().sum().backward()
        for each in sharded if kept else ():
            each.unshard()
        layer.zero_grad(set_to_none)
        reference[list(net).index(layer)].zero_grad(set_to_none)
        for each in sharded:
            each.reshard()
        _assert_same_gradients(net, reference)


@pytest.mark.parametrize("kept", [False, True], ids=["sharded", "unsharded"])
@distributed(2)
def test_a_move_of_one_module_moves_a_parameter_that_it_shares_with_another_group(
    kept: bool,
) -> None:
    reference, net = (_three_layers(bias=False) for _ in range(2))
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    for model in (reference, net):
        model(torch.ones(2, 4)).square().sum().backward()
        model.zero_grad()
    if kept:
        net[0].unshard()
    for model in (reference, net):
        model[1].double()
        model[2].double()
        model(torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()
    assert net[2].weight is net[0].weight
    _assert_same_gradients(net, reference)

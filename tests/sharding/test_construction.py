"""Ties and moves: parameters in several modules, other dtypes, frozen and thawed; every swap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.sharding import FSDPModule, fully_shard
from support.modules import in_turn
from support.parity.compare import full
from support.parity.engines import tell
from support.ranks import distributed
from support.surface.model import WIDTH, batch, build, sharded, train
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


# -- moves -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("after_a_step", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32])
@distributed(2)
def test_to_another_dtype_after_sharding_equals_the_unsharded_model_moved(
    dtype: torch.dtype, after_a_step: bool
) -> None:
    reference, net = build(), sharded(build())
    if after_a_step:
        for model in (net, reference):
            train(model, torch.optim.SGD(model.parameters(), lr=0.1), [0])
    for model in (net, reference):
        model.to(dtype)
    assert net.steps.dtype is dtype
    for name, param in net.named_parameters():
        assert isinstance(param, DTensor)
        assert param.dtype is dtype, name
        assert param.to_local().dtype is dtype, name
    x = batch().to(dtype)
    ours, theirs = net(x), reference(x)
    assert ours.dtype is dtype
    assert torch.equal(ours, theirs)
    ours.sum().backward()
    theirs.sum().backward()
    grad: Any = net.blocks[0].fc1.weight.grad  # type: ignore[union-attr]  # a Linear
    assert grad.dtype is dtype
    torch.testing.assert_close(grad.full_tensor(), reference.blocks[0].fc1.weight.grad)  # type: ignore[union-attr]  # a Linear


@distributed(2)
def test_a_move_of_one_sharded_block_leaves_the_rest_alone() -> None:
    net: Any = sharded(build())
    net(batch())
    net.blocks[0].to(torch.float64)
    assert net.blocks[0].fc1.weight.dtype is torch.float64
    assert net.blocks[1].fc1.weight.dtype is torch.float32
    assert net.head.weight.dtype is torch.float32


@distributed(2)
def test_a_move_of_an_inner_module_that_is_not_sharded_itself_is_seen_at_the_first_forward() -> (
    None
):
    net: Any = sharded(build())
    net.head.to(torch.bfloat16)
    x = net.blocks[0](torch.ones(1, WIDTH))
    assert x.dtype is torch.float32
    assert net.head.weight.dtype is torch.bfloat16


@distributed(2)
def test_a_tie_made_after_sharding_and_a_move_is_found() -> None:
    net: Any = Tied()
    fully_shard(net.embed)
    net.double()
    net.head.weight = net.embed.weight
    fully_shard(net)
    assert net.head.weight is net.embed.weight
    assert net(torch.tensor([0])).dtype is torch.float64


# -- every place is swapped ------------------------------------------------------------------------


def tied_linears() -> Any:
    """Three linears; the last has the weight of the first."""
    model = in_turn(**{name: nn.Linear(4, 4) for name in ("first", "second", "last")})
    model.last.weight = model.first.weight
    return model


def sharded_tied() -> Any:
    torch.manual_seed(3)
    model = tied_linears()
    return fully_shard(model)


def are_sharded(model: nn.Module) -> set[bool]:
    """Whether what each place holds is sharded."""
    return {
        isinstance(held, DTensor)
        for module in model.modules()
        for held in module._parameters.values()
    }


@distributed(2)
def test_a_place_that_comes_after_the_first_swaps_is_swapped_too() -> None:
    model = tied_linears()
    fully_shard(model.second)
    tell(model.second, "unshard")
    tell(model.second, "reshard")
    model.first.bias = model.second.bias
    fully_shard(model)
    tell(model.second, "unshard")
    assert not isinstance(model.first.bias, DTensor)
    assert model.first.bias is model.second.bias
    tell(model.second, "reshard")
    assert are_sharded(model) == {True}


@pytest.mark.parametrize("while_full", [False, True], ids=["sharded", "unsharded"])
@distributed(2)
def test_a_flag_that_is_set_on_what_is_registered_holds_for_both(while_full: bool) -> None:
    model = sharded_tied()
    x = torch.ones(2, 4)
    model(x).sum().backward()  # both kinds are there
    for flag in (False, True, False):
        model.zero_grad()
        if while_full:
            tell(model, "unshard")
        model.second.weight.requires_grad_(flag)
        if while_full:
            tell(model, "reshard")
        assert model.second.weight.requires_grad is flag
        model(x).sum().backward()
        assert model.second.weight.requires_grad is flag
        assert (model.second.weight.grad is not None) is flag
        assert model.first.weight.grad is not None
        tell(model, "unshard")
        assert model.second.weight.requires_grad is flag
        tell(model, "reshard")

"""The swap between sharded and unsharded parameters: every place, and flags that a user set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.sharding import fully_shard
from support.modules import in_turn
from support.parity.engines import tell
from support.ranks import distributed


def tied() -> Any:
    """Three linears; the last has the weight of the first."""
    model = in_turn(**{name: nn.Linear(4, 4) for name in ("first", "second", "last")})
    model.last.weight = model.first.weight
    return model


def sharded() -> Any:
    torch.manual_seed(3)
    model = tied()
    return fully_shard(model)


def are_sharded(model: nn.Module) -> set[bool]:
    """Whether what each place holds is sharded."""
    return {
        isinstance(held, DTensor)
        for module in model.modules()
        for held in module._parameters.values()
    }


@distributed(2)
def test_all_places_hold_the_one_kind_or_the_other() -> None:
    model = sharded()
    for _ in range(2):
        assert are_sharded(model) == {True}
        tell(model, "unshard")
        assert are_sharded(model) == {False}
        assert model.last.weight is model.first.weight
        tell(model, "reshard")
        assert model.last.weight is model.first.weight
    assert are_sharded(model) == {True}


@distributed(2)
def test_a_place_that_comes_after_the_first_swaps_is_swapped_too() -> None:
    model = tied()
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
    model = sharded()
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


@distributed(2)
def test_a_layer_explains_itself_while_its_parameters_are_sharded_and_only_then() -> None:
    model = sharded()
    x = torch.ones(2, 4)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"second \(Linear\) was called"):
            model.second(x)
        tell(model, "unshard")
        assert model.second(x).shape == (2, 4)
        assert "forward" not in vars(model.second)
        tell(model, "reshard")

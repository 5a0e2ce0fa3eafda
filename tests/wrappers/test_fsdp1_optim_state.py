"""Optimizer state by FSDP1's static methods: between ways to wrap, worlds, groups and names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.wrappers.fsdp1 import FullyShardedDataParallel, OptimStateKeyType
from support.fsdp1_fronts import (
    OURS,
    close,
    equal,
    full_state,
    train,
    unsharded_steps,
)
from support.named_optimizer import NamedAdamW
from support.ranks import distributed, run_on_ranks
from support.surface_model import Net, build, sharded
from support.surface_ranks import full_parameters

STEPS = 2


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, eps=0.05)


def _two_groups(model: Any) -> list[dict[str, Any]]:
    params = dict(model.named_parameters())
    vectors = [param for name, param in params.items() if name.endswith(("bias", "scale"))]
    matrices = [param for name, param in params.items() if name.endswith("weight")]
    return [{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "lr": 0.02}]


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "blocks": lambda net: OURS.wrapped(net),
    "the root alone": lambda net: OURS.wrapped(net, auto_wrap_policy=None),
    "layers": lambda net: OURS.wrapped(
        net, auto_wrap_policy=OURS.wrap.ModuleWrapPolicy({nn.Linear})
    ),
    "replicas": lambda net: OURS.wrapped(net, sharding_strategy="NO_SHARD"),
    "fully_shard": lambda net: sharded(cast(Net, net)),
    "unwrapped": lambda net: net,
}


def _trained(way: str, model: Any, optim: torch.optim.Optimizer) -> tuple[list[Any], Any]:
    """Losses and whole parameters after some more steps."""
    if way == "unwrapped":
        return unsharded_steps(model, STEPS, optimizer=lambda net: optim)
    losses = train(model, STEPS, optimizer=lambda net: optim)
    return losses, full_parameters(model)


def _definition(groups: Callable[[Any], Any]) -> tuple[list[Any], Any]:
    """What follows on the same number of steps, unsharded and never saved."""
    net = build()
    optim = adamw(groups(net))
    _trained("unwrapped", net, optim)
    return _trained("unwrapped", net, optim)


def _weights(way: str, model: Any) -> dict[str, torch.Tensor]:
    return full_parameters(model) if way == "fully_shard" else dict(model.state_dict())


@pytest.mark.cross
@pytest.mark.parametrize("keys", OptimStateKeyType)
@pytest.mark.parametrize("target", [way for way in WAYS if way != "blocks"])
@distributed(2, 4, matrix=[4])
def test_it_travels_from_one_wrapping_into_another_and_back(
    target: str, keys: OptimStateKeyType
) -> None:
    kind = FullyShardedDataParallel
    model = WAYS["blocks"](build())
    optim = adamw(_two_groups(model))
    _trained("blocks", model, optim)
    for way, before in ((target, "blocks"), ("blocks", target)):
        state = kind.full_optim_state_dict(model, optim, rank0_only=False)
        if keys is OptimStateKeyType.PARAM_ID:
            state = kind.rekey_optim_state_dict(state, keys, model, optim=optim)
        weights = _weights(before, model)
        model = WAYS[way](build(7))
        model.load_state_dict(weights, strict=False)  # full_parameters() has no buffers
        optim = adamw(_two_groups(model))
        if keys is OptimStateKeyType.PARAM_ID:
            loadable = kind.shard_full_optim_state_dict(state, model, optim=optim)
        else:
            loadable = kind.optim_state_dict_to_load(model, optim, state)
        optim.load_state_dict(copy.deepcopy(loadable))
    close(_trained("blocks", model, optim), _definition(_two_groups))


@pytest.mark.parametrize("target", [way for way in WAYS if way != "blocks"])
@distributed(2, 4, matrix=[4])
def test_what_was_loaded_elsewhere_trains_on(target: str) -> None:
    kind = FullyShardedDataParallel
    model = WAYS["blocks"](build())
    optim = adamw(_two_groups(model))
    _trained("blocks", model, optim)
    state = kind.full_optim_state_dict(model, optim)
    assert bool(state) is (dist.get_rank() == 0)
    other = WAYS[target](build(7))
    other.load_state_dict(model.state_dict())
    fresh = adamw(_two_groups(other))
    given = state if dist.get_rank() == 0 else None
    fresh.load_state_dict(kind.scatter_full_optim_state_dict(given, other, optim=fresh))
    close(_trained(target, other, fresh), _definition(_two_groups))


@distributed(2, 4, matrix=[4])
def test_parameters_may_be_given_instead_of_the_optimizer_and_the_group_by_name() -> None:
    kind, world = FullyShardedDataParallel, dist.group.WORLD
    model = OURS.wrapped()
    optim = adamw(_two_groups(model))
    _trained("blocks", model, optim)
    inputs = _two_groups(model)
    state = kind.full_optim_state_dict(model, optim, inputs, rank0_only=False, group=world)
    expected = kind.full_optim_state_dict(model, optim, rank0_only=False)
    equal(state["state"], expected["state"])
    assert state["param_groups"] == expected["param_groups"]
    loadable = kind.shard_full_optim_state_dict(state, model, optim=optim)
    for again in (
        kind.shard_full_optim_state_dict(state, model, inputs),
        kind.scatter_full_optim_state_dict(state, model, inputs, group=world),
        kind.flatten_sharded_optim_state_dict(
            kind.sharded_optim_state_dict(model, optim, group=world), model, optim
        ),
        kind.optim_state_dict_to_load(model, optim, state, group=world),
    ):
        assert again["param_groups"] == loadable["param_groups"]
        for key, found in loadable["state"].items():
            assert again["state"][key].keys() == found.keys()
            for name, value in found.items():
                assert torch.equal(_local(again["state"][key][name]), _local(value))
    ids = kind.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, model, inputs)
    names = kind.rekey_optim_state_dict(ids, OptimStateKeyType.PARAM_NAME, model, inputs)
    equal(names["state"], state["state"])


def _local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


@distributed(2, 4, matrix=[4])
def test_a_named_optimizers_state_goes_by_its_names() -> None:
    kind = FullyShardedDataParallel
    model = OURS.wrapped()
    optim = NamedAdamW(model)
    _trained("blocks", model, optim)
    state = kind.optim_state_dict(model, optim)
    assert set(state["state"]) == {name for name, _ in build().named_parameters()}
    other = OURS.wrapped(build(7), auto_wrap_policy=None)
    other.load_state_dict(model.state_dict())
    fresh = NamedAdamW(other)
    loadable = kind.optim_state_dict_to_load(other, fresh, state, is_named_optimizer=True)
    assert set(loadable["state"]) == {name for name, _ in other.named_parameters()}
    fresh.load_state_dict(loadable)
    equal(_trained("blocks", other, fresh), _trained("blocks", model, optim))


@distributed(2, 4, matrix=[4])
def test_it_may_be_loaded_directly() -> None:
    kind = FullyShardedDataParallel
    model = OURS.wrapped()
    optim = adamw(model.parameters())
    _trained("blocks", model, optim)
    other = OURS.wrapped(build(7))
    other.load_state_dict(model.state_dict())
    fresh = adamw(other.parameters())
    state = kind.optim_state_dict(model, optim)
    kind.optim_state_dict_to_load(other, fresh, state, load_directly=True)
    equal(_trained("blocks", other, fresh), _trained("blocks", model, optim))


def _saved() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    model = OURS.wrapped()
    optim = adamw(model.parameters())
    train(model, STEPS, optimizer=lambda net: optim)
    return dict(model.state_dict()), FullyShardedDataParallel.full_optim_state_dict(model, optim)


def _loaded(weights: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
    """Takes over what ranks of another number left, and does what the unsharded model does."""
    plain, model = build(7), OURS.wrapped(build(7), auto_wrap_policy=None)
    theirs, ours = adamw(plain.parameters()), adamw(model.parameters())
    plain.load_state_dict(weights)
    model.load_state_dict(weights)
    kind = FullyShardedDataParallel
    theirs.load_state_dict(kind.shard_full_optim_state_dict(state, plain, optim=theirs))
    given = state if dist.get_rank() == 0 else None
    ours.load_state_dict(kind.scatter_full_optim_state_dict(given, model, optim=ours))
    expected = _trained("unwrapped", plain, theirs)
    equal((train(model, STEPS, optimizer=lambda net: ours), full_state(OURS, model)), expected)


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)], ids=["doubled", "halved"])
def test_it_goes_to_another_number_of_ranks(before: int, after: int) -> None:
    weights, state = run_on_ranks(_saved, before)[0]
    run_on_ranks(_loaded, after, weights, state)

"""Gradients that wait for a reduction stay when parameters change their dtype or are replaced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fullshard.policies import CanonicalOrder
from fullshard.sharding import ShardingPlacements, fully_shard
from support.modules import Assembled
from support.parity.compare import assert_equal, gradients_of, rounding
from support.ranks import cpu_mesh, distributed
from support.surface.model import batch, build, sharded

HOW = ["without synchronisation", "ZeRO-1", "in flight"]


def _sharded(how: str) -> Any:
    mesh = cpu_mesh(None, ("inner",))
    zero_1 = {"placements": ShardingPlacements.zero(1), "mesh": mesh} if how == "ZeRO-1" else {}
    return sharded(build(), **zero_1)


def _announce(model: Any, how: str, *, last: bool) -> None:
    if how == "without synchronisation":
        model.set_requires_gradient_sync(last)
    else:
        model.set_is_last_backward(last)


@pytest.mark.parametrize("how", HOW)
@distributed(2)
def test_gradients_follow_parameters_into_another_dtype(how: str, world_size: int) -> None:
    model, whole = _sharded(how), build()
    for micro in range(2):
        _announce(model, how, last=bool(micro))
        for each in (model, whole):
            if micro:
                each.double()
            each(batch().to(each.head.weight.dtype)).sum().backward()
    allowed = rounding(world_size, steps=2, dtype=torch.float32)
    assert_equal(gradients_of(model), gradients_of(whole), allowed, "gradients")


@pytest.mark.parametrize("how", HOW)
@distributed(2)
def test_only_the_gradient_of_a_replaced_parameter_is_dropped(how: str, world_size: int) -> None:
    """As with a new parameter of the unsharded model, which has no gradient yet."""
    model, whole = _sharded(how), build()
    for micro in range(2):
        _announce(model, how, last=bool(micro))
        if micro:
            old, value = model.head.weight, torch.full_like(whole.head.weight.detach(), 0.1)
            assert isinstance(old, DTensor)
            new = distribute_tensor(value, old.device_mesh, old.placements)
            model.head.weight, whole.head.weight = nn.Parameter(new), nn.Parameter(value)
        for each in (model, whole):
            each(batch()).sum().backward()
    allowed = rounding(world_size, steps=2)
    assert_equal(gradients_of(model), gradients_of(whole), allowed, "gradients")


@distributed(4)
def test_results_of_a_first_reduction_are_dropped_with_a_warning() -> None:
    model = fully_shard(nn.Linear(4, 4), mesh=cpu_mesh((2, 2), ("replicate", "shard")))
    model.set_requires_all_reduce(False)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.warns(RuntimeWarning, match=r"changed their dtype, so gradients .* are dropped"):
        model.double()
    model.set_requires_all_reduce(True)
    model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    gradient: Any = model.weight.grad
    assert torch.equal(gradient.full_tensor(), torch.ones(4, 4, dtype=torch.float64))


def _skipping() -> Any:
    torch.manual_seed(0)
    extra, last = nn.Linear(4, 4), nn.Linear(4, 4)
    return Assembled(lambda m, x, runs: m.last(m.extra(x) if runs else x), extra=extra, last=last)


@distributed(2)
def test_in_the_canonical_order_a_rank_that_skips_a_group_has_its_new_parameter(
    world_size: int,
) -> None:
    model, whole = _skipping(), _skipping()
    fully_shard(model.extra)
    fully_shard(model)
    model.set_schedule(CanonicalOrder())
    for step in range(3):
        for each in (model, whole):
            if step:
                weight = each.extra.weight.detach()
                each.extra.weight = nn.Parameter(weight * 0.5)
            each.zero_grad()
        model(torch.ones(2, 4), dist.get_rank() == step % 2).square().sum().backward()
        for rank in range(world_size):
            (whole(torch.ones(2, 4), rank == step % 2).square().sum() / world_size).backward()
        allowed = rounding(world_size, steps=step + 1)
        assert_equal(gradients_of(model), gradients_of(whole), allowed, f"gradients {step}")

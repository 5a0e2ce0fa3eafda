"""Two models that share a module: either backward leaves its gradients, and they train."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.policies import CanonicalOrder
from fullshard.sharding import ShardingPlacements, fully_shard
from support.modules import in_turn
from support.parity.compare import assert_equal, gradients_of, parameters_of, rounding
from support.ranks import cpu_mesh, distributed

PROGRAMS = {  # which models run in each step
    "by turns": ((0,), (1,), (0,), (0,)),
    "the second first": ((1,), (0,), (1,)),
    "one after the other": ((0, 1), (1, 0)),
}
WAYS = ["default", "ZeRO-1", "canonical", "sharded by itself"]


def _models() -> list[Any]:
    torch.manual_seed(0)
    trunk = nn.Linear(4, 4)
    return [
        in_turn(inner=nn.Linear(4, 4), act=nn.Tanh(), trunk=trunk, head=nn.Linear(4, 3)).double()
        for _ in range(2)
    ]


def _sharded(way: str) -> list[Any]:
    models, options = _models(), dict[str, Any]()
    if way == "ZeRO-1":
        mesh = cpu_mesh((dist.get_world_size(),), ("inner",))
        options = {"placements": ShardingPlacements.zero(1), "mesh": mesh}
    if way == "sharded by itself":
        fully_shard(models[0].trunk)
    for model in models:
        fully_shard(model.inner, **options)
        fully_shard(model, **options)
        if way == "canonical":
            model.set_schedule(CanonicalOrder())
    return models


def _loss(model: Any, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    rows = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    loss: torch.Tensor = model(rows).square().mean()
    return loss


def _optimizer(models: list[Any]) -> torch.optim.Optimizer:
    params = dict.fromkeys(param for model in models for param in model.parameters())
    return torch.optim.SGD(list(params), lr=0.1, momentum=0.9)


@pytest.mark.cross
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("together", [False, True])
@distributed(2)
def test_models_that_share_a_module_train_as_without_sharding(
    way: str, program: str, together: bool, world_size: int
) -> None:
    """Gradients of a step are compared before the step, so none is late."""
    mine, whole = _sharded(way), _models()
    both = [_optimizer(each) for each in (mine, whole)]
    for step, turns in enumerate(PROGRAMS[program]):
        losses = [_loss(mine[turn], step, dist.get_rank()) for turn in turns if together]
        if together:
            torch.stack(losses).sum().backward()
        for turn in turns:
            if not together:
                _loss(mine[turn], step, dist.get_rank()).backward()
            for rank in range(world_size):
                (_loss(whole[turn], step, rank) / world_size).backward()
        allowed = rounding(world_size, steps=step + 1)
        for got, want in zip(mine, whole, strict=True):
            assert_equal(gradients_of(got), gradients_of(want), allowed, f"gradients {step}")
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
        for got, want in zip(mine, whole, strict=True):
            assert_equal(parameters_of(got), parameters_of(want), allowed, f"parameters {step}")


@distributed(2)
def test_a_model_that_shares_a_module_joins_two_that_do_not_share_one() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    parts = [[first], [second], [first, second]]
    mine = [nn.Sequential(*some, nn.Linear(4, 4)) for some in parts]
    for model in mine:
        fully_shard(model)
    for turn in (0, 1, 2, 0, 1, 2):
        mine[turn](torch.ones(2, 4)).sum().backward()
        for param in mine[turn].parameters():
            assert param.grad is not None
            param.grad = None


@distributed(2)
def test_a_model_that_is_gone_is_not_kept_by_one_that_shared_a_module_with_it() -> None:
    first, second = _sharded("default")
    for model in (first, second, first):
        model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    gone = weakref.ref(second.head)
    del second, model
    gc.collect()
    assert gone() is None
    first.zero_grad()
    first(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    assert first.trunk.weight.grad is not None

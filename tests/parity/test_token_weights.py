"""Token-weighted gradients: a divisor on the device gives the mean over all tokens everywhere.

The definition is one plain model on all tokens of all ranks and micro-batches, whose loss is the
mean over tokens. Ranks hold different numbers of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.sharding import FSDPModule, fully_shard
from support.parity.compare import assert_equal, gradients_of, rounding
from support.ranks import cpu_mesh, distributed

TOKENS = (3, 8, 1, 5)  # of each rank, in each micro-batch twice as many as in the one before
MICRO_BATCHES = 2
DTYPE = torch.float64


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).to(DTYPE)


def tokens_of(rank: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * micro + rank)
    return torch.randn(TOKENS[rank] * (micro + 1), 6, generator=generator, dtype=DTYPE)


def sum_of_losses(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).square().sum()


def reference(world_size: int) -> nn.Module:
    model = make_model()
    every = [tokens_of(r, m) for r in range(world_size) for m in range(MICRO_BATCHES)]
    count = sum(each.shape[0] for each in every)
    (sum_of_losses(model, torch.cat(every)) / count).backward()
    return model


def global_count() -> torch.Tensor:
    count = torch.tensor(
        sum(tokens_of(dist.get_rank(), micro).shape[0] for micro in range(MICRO_BATCHES))
    )
    dist.all_reduce(count)
    return count


def shard(mesh: DeviceMesh | None = None) -> nn.Sequential:
    model = make_model()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def divide_by(model: nn.Module, factor: torch.Tensor | float) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)


def _nothing(model: FSDPModule, last: bool) -> None:
    """Every micro-batch reduces."""


def _without_communication(model: FSDPModule, last: bool) -> None:
    model.set_requires_gradient_sync(last)


def _not_waiting(model: FSDPModule, last: bool) -> None:
    model.set_is_last_backward(last)


def _without_all_reduce(model: FSDPModule, last: bool) -> None:
    model.set_requires_all_reduce(last)


def run(model: nn.Sequential, before: Callable[[FSDPModule, bool], None]) -> None:
    assert isinstance(model, FSDPModule)
    for micro in range(MICRO_BATCHES):
        before(model, micro == MICRO_BATCHES - 1)
        sum_of_losses(model, tokens_of(dist.get_rank(), micro)).backward()


def _assert_mean(before: Callable[[FSDPModule, bool], None], mesh: DeviceMesh | None) -> None:
    model, world_size = shard(mesh), dist.get_world_size()
    divide_by(model, global_count())
    run(model, before)
    want = gradients_of(reference(world_size))
    assert_equal(gradients_of(model), want, rounding(world_size), "gradients")


@pytest.mark.cross
@pytest.mark.parametrize("before", [_nothing, _without_communication, _not_waiting])
@distributed(2, 4, matrix=[4])
def test_the_mean_over_all_tokens_of_all_ranks_and_micro_batches(before: Any) -> None:
    _assert_mean(before, None)


@pytest.mark.parametrize("before", [_nothing, _without_communication, _without_all_reduce])
@distributed(4)
def test_the_same_mean_on_a_hybrid_mesh(before: Any) -> None:
    _assert_mean(before, cpu_mesh((2, 2), ("replicate", "shard")))


@distributed(2)
def test_what_the_divisor_held_at_the_backward_counts_even_if_its_end_did_not_wait() -> None:
    model, plain = shard(), make_model()
    assert isinstance(model, FSDPModule)
    factor = torch.tensor(2.0)
    divide_by(model, factor)
    model.set_is_last_backward(False)
    sum_of_losses(model, tokens_of(0, 0)).backward()
    factor.fill_(4.0)
    model.set_is_last_backward(True)
    sum_of_losses(model, tokens_of(0, 1)).backward()
    # Both ranks saw the same tokens, so the sum over ranks is twice one rank's.
    total = sum_of_losses(plain, tokens_of(0, 0)) + sum_of_losses(plain, tokens_of(0, 1)) / 2
    total.backward()
    assert_equal(gradients_of(model), gradients_of(plain), rounding(2), "gradients")


@distributed(2)
def test_a_number_after_a_tensor_counts_again() -> None:
    model, plain = shard(), make_model()
    divide_by(model, torch.tensor(7.0))
    run(model, _nothing)
    model.zero_grad()
    divide_by(model, 2.0)
    sum_of_losses(model, tokens_of(0, 0)).backward()
    sum_of_losses(plain, tokens_of(0, 0)).backward()
    assert_equal(gradients_of(model), gradients_of(plain), rounding(2), "gradients")

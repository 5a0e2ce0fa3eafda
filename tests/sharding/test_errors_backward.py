"""A backward that raised, followed by another backward with no forward in between."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.sharding import fully_shard
from support.ranks import distributed


class Broken(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("broken")


def run(net: Any, batch: torch.Tensor) -> None:
    """Two forwards; the first one's backward raises below the last layer, the second's is whole."""
    function: Any = Broken
    broken = net[1](function.apply(net[0](batch))).sum()
    whole = net(batch).square().sum()
    with pytest.raises(ValueError, match="broken"):
        broken.backward()
    whole.backward()


@distributed(2)
def test_a_backward_after_one_that_raised_still_puts_its_gradients_in_place() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    net = copy.deepcopy(plain)
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    net(torch.ones(1, 3))  # makes net the root of its layers
    batches = torch.randn(dist.get_world_size(), 5, 3)
    run(net, batches[dist.get_rank()])
    expected = [torch.zeros_like(param) for param in plain.parameters()]
    for batch in batches:
        plain.zero_grad()
        run(plain, batch)
        for total, param in zip(expected, plain.parameters(), strict=True):
            assert param.grad is not None
            total += param.grad / len(batches)
    for name, param, total in zip(
        dict(plain.named_parameters()), net.parameters(), expected, strict=True
    ):
        gradient: Any = param.grad
        assert gradient is not None, name
        torch.testing.assert_close(gradient.full_tensor(), total)

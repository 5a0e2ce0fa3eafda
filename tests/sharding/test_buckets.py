"""Small reductions that share launches: the same gradients, fewer collectives, on every path."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard.comm import (
    AllToAllTransport,
    DefaultReduceScatter,
    EventKind,
    EventLog,
    observe,
    same_host_transport,
)
from fullshard.comm.same_host import shared_peers
from fullshard.sharding import fully_shard
from support.apart import apart
from support.modules import Assembled
from support.ranks import distributed


def make(layers: int = 6, **options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(5, 5) for _ in range(layers)))
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def batch(step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(3, 5, generator=generator)


def train(model: Any, steps: int = 2) -> list[torch.Tensor]:
    """The gradients of some steps, accumulated."""
    for step in range(steps):
        model(batch(step)).square().sum().backward()
    return [param.grad.to_local().clone() for param in model.parameters()]


def launches(model: Any) -> int:
    """Reduce-scatters that one step launches."""
    log = EventLog()
    with observe(log):
        model(batch()).square().sum().backward()
    return len(log.of(EventKind.REDUCE_SCATTER))


@distributed(2)
def test_small_reductions_share_a_launch_and_give_the_same_bits() -> None:
    with apart() as mesh:
        together, alone = make(mesh=mesh), make(mesh=mesh)
        alone.set_reduce_bucket_cap(0)
        for mine, theirs in zip(train(together), train(alone), strict=True):
            assert torch.equal(mine, theirs)
        assert launches(alone) == 6
        assert launches(together) == 1


@distributed(2)
def test_a_bucket_is_launched_whenever_the_next_does_not_fit() -> None:
    with apart() as mesh:
        model, wanted = make(mesh=mesh), make(mesh=mesh)
        wanted.set_reduce_bucket_cap(0)
        # a layer takes 30 numbers and 2 marks, in two slices that end on 16 bytes: 160 bytes or so
        model.set_reduce_bucket_cap(400 / 2**20)
        for mine, theirs in zip(train(model), train(wanted), strict=True):
            assert torch.equal(mine, theirs)
        assert 2 <= launches(model) <= 5


@distributed(2)
def test_ranks_that_share_memory_need_no_bucket() -> None:
    assert launches(make()) == 6


@distributed(2)
def test_a_collective_of_the_users_own_is_called_once_for_each_group() -> None:
    class Counting(DefaultReduceScatter):
        calls = 0

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            Counting.calls += 1
            return super().__call__(*args, **kwargs)

    with apart() as mesh:
        model, wanted = make(mesh=mesh), make(mesh=mesh)
        own = Counting()
        for layer in model:
            layer.set_custom_reduce_scatter(own)
        for mine, theirs in zip(train(model), train(wanted), strict=True):
            assert torch.equal(mine, theirs)
    assert Counting.calls == 2 * len(model)


@distributed(4)
def test_a_hybrid_mesh_reduces_each_group_by_itself() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with patch.object(shared_peers, "host_identity", lambda: f"host {dist.get_rank()}"):
        assert same_host_transport(mesh.get_group("shard")) == AllToAllTransport()
    model, wanted = make(mesh=mesh), make()
    train(model)
    train(wanted)
    for mine, theirs in zip(model.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad.full_tensor())
    assert launches(model) == 6


@distributed(2)
def test_a_parameter_that_one_rank_did_not_use_gets_its_gradient_and_one_that_none_did_none() -> (
    None
):
    def choosing() -> Any:
        torch.manual_seed(0)
        return Assembled(
            lambda m, x: x * m.both + (m.first if dist.get_rank() == 0 else 0),
            **{name: nn.Parameter(torch.randn(4)) for name in ("both", "first", "none")},
        )

    with apart() as mesh:
        layers = (fully_shard(choosing(), mesh=mesh) for _ in range(2))
        model: Any = fully_shard(nn.Sequential(*layers), mesh=mesh)
        model(torch.ones(4)).sum().backward()
    for layer in model:
        assert layer.both.grad is not None and layer.first.grad is not None
        assert layer.none.grad is None


@distributed(2)
def test_what_waits_in_a_backward_that_raises_is_forgotten() -> None:
    with apart() as mesh:
        model, wanted = make(mesh=mesh), make(mesh=mesh)
        failing = True

        def fail(gradient: torch.Tensor) -> None:
            if failing:
                raise KeyError("in the middle")

        def watch(layer: nn.Module, args: Any, output: torch.Tensor) -> None:
            output.register_hook(fail)

        model[2].register_forward_hook(watch)
        with pytest.raises(KeyError, match="in the middle"):
            model(batch(7)).sum().backward()
        failing = False
        model.reset_iter_state()
        for mine, theirs in zip(train(model), train(wanted), strict=True):
            assert torch.equal(mine, theirs)


@distributed(2)
def test_a_wrong_cap_is_an_error() -> None:
    model = make(1)
    with pytest.raises(TypeError, match="cap_mb is 'much', a str"):
        model.set_reduce_bucket_cap("much")
    for wrong in (-1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="cap_mb is"):
            model.set_reduce_bucket_cap(wrong)

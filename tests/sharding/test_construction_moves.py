"""Sharded modules moved to another dtype, frozen and thawed: as the unsharded module, or better."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from fullshard.sharding import fully_shard
from support.parity.compare import full
from support.ranks import distributed
from support.surface.model import WIDTH, Net, batch, build, sharded, train
from support.surface.ties import Tied


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
def test_parameters_stay_tied_after_a_move() -> None:
    net: Any = Tied()
    fully_shard(net.embed)
    fully_shard(net)
    net.to(torch.float64)
    net(torch.tensor([0])).sum().backward()
    assert net.head.weight is net.embed.weight
    assert net.head.weight.dtype is torch.float64


@distributed(2)
def test_a_tie_made_after_sharding_and_a_move_is_found() -> None:
    net: Any = Tied()
    fully_shard(net.embed)
    net.double()
    net.head.weight = net.embed.weight
    fully_shard(net)
    assert net.head.weight is net.embed.weight
    assert net(torch.tensor([0])).dtype is torch.float64


def _gradients(net: Net) -> dict[str, torch.Tensor | None]:
    return {n: None if p.grad is None else full(p.grad) for n, p in net.named_parameters()}


@pytest.mark.parametrize("reshard", [True, False, None])
@distributed(2)
def test_parameters_thawed_after_a_forward_train_as_unsharded(reshard: bool | None) -> None:
    reference, net = build(), sharded(build(), reshard_after_forward=reshard)
    for model in (net, reference):
        model.requires_grad_(False)
        assert not model(batch()).requires_grad
        model.requires_grad_(True)
        model(batch()).sum().backward()
    theirs = _gradients(reference)
    for name, grad in _gradients(net).items():
        assert grad is not None, name
        torch.testing.assert_close(grad, theirs[name])


@pytest.mark.parametrize("reshard", [True, False, None])
@distributed(2)
def test_parameters_frozen_after_an_eval_forward_stay_frozen(reshard: bool | None) -> None:
    net = sharded(build(), reshard_after_forward=reshard)
    with torch.no_grad():
        net(batch())
    net.stem.requires_grad_(False)
    net.blocks[0].requires_grad_(False)
    net(batch()).sum().backward()
    frozen = {name for name, grad in _gradients(net).items() if grad is None}
    assert frozen == {n for n, _ in net.named_parameters() if n.startswith(("stem", "blocks.0"))}
    assert not net.stem.weight.requires_grad

"""World size 1 over NCCL: training on one card equals the unsharded model on it."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from fullshard.policies import MixedPrecisionPolicy
from fullshard.sharding import fully_shard
from support.wide.gpu import CARD, card_world
from support.wide.model import (
    LEARNING_RATE,
    local,
    loss_of,
    make_batch,
    make_stack,
    shard,
    train_whole,
)

pytestmark = pytest.mark.gpu

STEPS = 4


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    with card_world(tmp_path_factory.mktemp("world")) as mesh:
        yield mesh


@pytest.mark.parametrize("reshard", [None, True, False])
def test_steps_equal_those_of_the_unsharded_model(mesh: DeviceMesh, reshard: bool | None) -> None:
    batches = [make_batch(8, step).to(CARD) for step in range(STEPS)]
    whole = make_stack().to(CARD)
    expected = train_whole(whole, batches)
    model = shard(make_stack().to(CARD), mesh=mesh, reshard_after_forward=reshard)
    losses = train_whole(model, batches)
    assert losses == pytest.approx(expected, rel=1e-5)
    for param, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(local(param), other.detach(), rtol=1e-5, atol=1e-6)


def test_a_model_on_the_cpu_is_moved_to_the_card(mesh: DeviceMesh) -> None:
    model = fully_shard(make_stack(), mesh=mesh)
    assert {local(param).device for param in model.parameters()} == {CARD}
    loss = loss_of(model, make_batch(1, 0))  # the root moves its inputs, too
    assert loss.device == CARD


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam])
def test_optimizers_run_on_shards_on_the_card(
    mesh: DeviceMesh, optimizer: type[torch.optim.Optimizer]
) -> None:
    model = fully_shard(make_stack().to(CARD), mesh=mesh)
    stepper = optimizer(model.parameters(), lr=LEARNING_RATE)  # type: ignore[call-arg]  # all have it
    batch = make_batch(8, 0).to(CARD)
    losses = []
    for _ in range(20):
        loss = loss_of(model, batch)
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_mixed_precision_equals_casting_by_hand(mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    batch = make_batch(8, 0).to(CARD)
    model = shard(make_stack().to(CARD), mesh=mesh, mp_policy=policy)
    model(batch).float().square().mean().backward()
    hand = copy.deepcopy(make_stack()).to(CARD).bfloat16()
    hand(batch.bfloat16()).float().square().mean().backward()
    for param, other in zip(model.parameters(), hand.parameters(), strict=True):
        assert other.grad is not None
        found = local(param.grad)
        assert found.dtype is torch.float32
        scale = other.grad.float().abs().max().item()
        # The same kernels on the same values; leave one rounding of bf16 for the choice of kernel.
        torch.testing.assert_close(found, other.grad.float(), rtol=2**-7, atol=2**-7 * scale)

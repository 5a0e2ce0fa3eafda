"""``fully_shard`` in worlds of 8 and 32 threads: whole steps, against the unsharded model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from fullshard.sharding import FSDPModule
from support.collectives import ToldAllGather
from support.products import few
from support.threads.ranks import ThreadRank, run_on_threads
from support.threads.world import run_program_on_threads
from support.wide.model import (
    LEARNING_RATE,
    Stack,
    gradients_by_ranks,
    local,
    loss_of,
    make_batch,
    make_stack,
    shard,
    train_whole,
)

STEPS = 3


def _sharded(model: Stack, **options: Any) -> Stack:
    """A sharded copy: threads must not share a module."""
    return shard(copy.deepcopy(model), **options)


def _locals(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [local(tensor).clone() for tensor in tensors]


def _parts(world_size: int, rank: int) -> list[torch.Tensor]:
    """A rank's part of the batch of each step."""
    return [make_batch(world_size, step).chunk(world_size)[rank] for step in range(STEPS)]


def _joined(shards: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Full tensors from ``shards[rank][tensor]``."""
    return [torch.cat(list(column)) for column in zip(*shards, strict=True)]


def _by_ranks(model: Stack, world_size: int) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """Gradients of each step, and parameters after the last; on a thread, as the ranks are."""

    def body(rank: ThreadRank) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
        replica = copy.deepcopy(model)
        optimizer = torch.optim.SGD(replica.parameters(), lr=LEARNING_RATE)
        history = []
        for step in range(STEPS):
            parts = make_batch(world_size, step).chunk(world_size)
            gradients = gradients_by_ranks(replica, parts)
            for param, gradient in zip(replica.parameters(), gradients, strict=True):
                param.grad = gradient
            optimizer.step()
            history.append(gradients)
        return history, [param.detach() for param in replica.parameters()]

    return run_on_threads(body, 1)[0]


@pytest.mark.cross
@pytest.mark.parametrize("world_size", few([8, 32], 8))
@pytest.mark.parametrize("reshard", few([True, 4, None, False], True, 4))
def test_steps_equal_those_of_the_unsharded_model(
    world_size: int, reshard: bool | int | None
) -> None:
    model = make_stack()
    expected_gradients, expected_params = _by_ranks(model, world_size)
    whole = copy.deepcopy(model)
    expected_losses = train_whole(whole, [make_batch(world_size, step) for step in range(STEPS)])

    def body(
        rank: ThreadRank,
    ) -> tuple[list[float], list[list[torch.Tensor]], list[torch.Tensor]]:
        own = _sharded(model, reshard_after_forward=reshard)
        optimizer = torch.optim.SGD(own.parameters(), lr=LEARNING_RATE)
        losses, gradients = [], []
        for part in _parts(world_size, rank.rank):
            loss = loss_of(own, part)
            loss.backward()
            gradients.append(_locals([param.grad for param in own.parameters()]))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, gradients, _locals(list(own.parameters()))

    results = run_program_on_threads(body, world_size)
    for step in range(STEPS):
        loss = sum(losses[step] for losses, _, _ in results) / world_size
        assert loss == pytest.approx(expected_losses[step], rel=1e-6)
        for found, expected in zip(
            _joined([gradients[step] for _, gradients, _ in results]),
            expected_gradients[step],
            strict=True,
        ):
            assert torch.equal(found, expected)
    params = _joined([shards for _, _, shards in results])
    for found, expected, also in zip(params, expected_params, whole.parameters(), strict=True):
        assert torch.equal(found, expected)
        torch.testing.assert_close(found, also.detach(), rtol=1e-5, atol=1e-6)


def test_backward_gathers_from_the_smaller_world_that_forward_resharded_to() -> None:
    world_size, smaller = 32, 4
    model = make_stack(blocks=3)

    def body(rank: ThreadRank) -> list[int]:
        own = _sharded(model, reshard_after_forward=smaller)
        sizes: list[int] = []
        noting = ToldAllGather(lambda output, group: sizes.append(group.size()))
        for module in own.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(noting)
        loss_of(own, _parts(world_size, rank.rank)[0]).backward()
        return sizes

    expected = [world_size] * 4 + [smaller] * 4
    assert run_program_on_threads(body, world_size) == [expected] * world_size


@pytest.mark.parametrize("shape", few([(2, 4), (8, 4)], (2, 4)), ids=["2x4", "8x4"])
def test_shards_may_be_replicated(shape: tuple[int, int]) -> None:
    """Reduced over shards, then over replicas: the whole batch, within rounding."""
    replicas, shards = shape
    world_size = replicas * shards
    model, whole = make_stack(), make_stack()
    train_whole(whole, [make_batch(world_size, step) for step in range(STEPS)])

    def body(rank: ThreadRank) -> list[torch.Tensor]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        own = _sharded(model, mesh=mesh)
        train_whole(own, _parts(world_size, rank.rank))
        return _locals(list(own.parameters()))

    results = run_program_on_threads(body, world_size)
    for replica in range(replicas):
        params = _joined(results[replica * shards : (replica + 1) * shards])
        for found, expected in zip(params, whole.parameters(), strict=True):
            torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6)
        for found, first in zip(params, _joined(results[:shards]), strict=True):
            assert torch.equal(found, first)  # replicas never drift apart

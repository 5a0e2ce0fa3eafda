"""``placements=`` in worlds of 8 and 64 threads, against the unsharded model.

Threads add in the order of their ranks, so sums are known to the bit: over all ranks, or first over
the ranks of one level and then over those of the other.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from fullshard.sharding import ShardingPlacements
from support.products import few
from support.threads.ranks import ThreadRank, run_on_threads
from support.threads.world import run_program_on_threads
from support.wide.model import (
    LEARNING_RATE,
    Stack,
    gradients_by_ranks,
    local,
    make_batch,
    make_stack,
    shard,
)

STEPS, MICRO_BATCHES = 2, 2
PLACEMENTS = {
    "inner": ShardingPlacements(compute="inner", gradients="inner"),
    "ZeRO-1": ShardingPlacements(compute=(), gradients=()),
    "ZeRO-2": ShardingPlacements(compute=()),
    "ZeRO-3": ShardingPlacements(),
    "hpZ": ShardingPlacements(compute="inner"),
}
TWO_LEVELS = ("inner", "hpZ")
SHAPES = few([(2, 4), (8, 8)], (2, 4), (8, 8))


def _index(step: int, micro_batch: int) -> int:
    return step * MICRO_BATCHES + micro_batch


def _added(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _total(grads: Sequence[torch.Tensor], name: str, shape: tuple[int, int]) -> torch.Tensor:
    """The sum of the ranks' gradients in the order in which placements ``name`` add them."""
    if name not in TWO_LEVELS:
        return _added(grads)
    inner = shape[1]
    return _added([_added(grads[at : at + inner]) for at in range(0, len(grads), inner)])


def _reference(model: Stack, name: str, shape: tuple[int, int]) -> list[torch.Tensor]:
    """The parameters after all steps, on a thread, as the ranks are."""
    ranks = shape[0] * shape[1]

    def body(rank: ThreadRank) -> list[torch.Tensor]:
        replica = copy.deepcopy(model)
        params = list(replica.parameters())
        optimizer = torch.optim.SGD(params, lr=LEARNING_RATE)
        for step in range(STEPS):
            history = []
            for micro_batch in range(MICRO_BATCHES):
                parts = make_batch(ranks, _index(step, micro_batch)).chunk(ranks)
                history.append([gradients_by_ranks(replica, [part]) for part in parts])
            for at, param in enumerate(params):
                param.grad = _mean([[own[at] for own in each] for each in history], name, shape)
            optimizer.step()
        return [param.detach() for param in params]

    return run_on_threads(body, 1)[0]


def _mean(
    history: Sequence[Sequence[torch.Tensor]], name: str, shape: tuple[int, int]
) -> torch.Tensor:
    """The gradient of one parameter: ``history[micro_batch][rank]``, summed where they wait."""
    scale = 1 / (shape[0] * shape[1])
    if name == "ZeRO-1":  # each rank adds its own first
        return _added([_added(own) for own in zip(*history, strict=True)]) * scale
    if name == "inner":  # each level adds what it has reduced
        inner = shape[1]
        rows = [
            _added([_added(grads[at : at + inner]) for grads in history])
            for at in range(0, shape[0] * inner, inner)
        ]
        return _added(rows) * scale
    return _added([_total(grads, name, shape) * scale for grads in history])


@pytest.mark.cross
@pytest.mark.parametrize("name", few(PLACEMENTS, "inner", "ZeRO-1"))
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_steps_equal_those_of_the_unsharded_model_to_the_bit(
    name: str, shape: tuple[int, int]
) -> None:
    model = make_stack()
    expected = _reference(model, name, shape)
    ranks = shape[0] * shape[1]

    def body(rank: ThreadRank) -> list[torch.Tensor]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))
        own: Any = shard(copy.deepcopy(model), mesh=mesh, placements=PLACEMENTS[name])
        optimizer = torch.optim.SGD(own.parameters(), lr=LEARNING_RATE)
        for step in range(STEPS):
            for micro_batch in range(MICRO_BATCHES):
                part = make_batch(ranks, _index(step, micro_batch)).chunk(ranks)[rank.rank]
                loss = (own(part) - 1).square().mean()
                own.set_is_last_backward(micro_batch == MICRO_BATCHES - 1)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [local(param).clone() for param in own.parameters()]

    shards = run_program_on_threads(body, ranks)
    if name in TWO_LEVELS:  # cut over inner first
        shards = [shards[rank] for at in range(shape[1]) for rank in range(at, ranks, shape[1])]
    for mine, wanted in zip(zip(*shards, strict=True), expected, strict=True):
        assert torch.equal(torch.cat(mine), wanted)

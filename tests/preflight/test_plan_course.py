"""Memory over a step, place by place: its parts add up, and are those of the peak at the peak."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fullshard.policies import CPUOffloadPolicy, OffloadPolicy
from fullshard.preflight import Plan, plan
from fullshard.preflight.planning.memory.ledger import Category
from fullshard.sharding import fully_shard


def _planned(policy: OffloadPolicy, device: str | None, micro_batches: int = 1) -> Plan:
    def shard(model: nn.Module) -> None:
        for layer in model.children():
            fully_shard(layer, offload_policy=policy)
        fully_shard(model, offload_policy=policy)

    return plan(
        lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))),
        torch.empty(8, 64),
        lambda model, batch: model(batch).square().mean(),
        shard=shard,
        mesh=4,
        micro_batches=micro_batches,
        device=device,
    )


@pytest.mark.parametrize("policy", [OffloadPolicy(), CPUOffloadPolicy()], ids=["kept", "offloaded"])
@pytest.mark.parametrize("device", [None, "h100", "cpu"])
def test_the_parts_of_each_place_add_up_to_its_memory(
    policy: OffloadPolicy, device: str | None
) -> None:
    planned = _planned(policy, device, micro_batches=2)
    assert planned.course_parts.keys() == planned.course.keys()
    for place, parts in planned.course_parts.items():
        assert sum(parts.values()) == planned.course[place], place
        assert min(parts.values()) > 0, place
    peak = {each: size for each, size in planned.categories.items() if size}
    assert planned.course_parts[planned.place] == peak


def test_gradients_grow_in_backward_as_activations_go() -> None:
    planned = _planned(OffloadPolicy(), "h100")
    backward = [parts for place, parts in planned.course_parts.items() if place.phase == "backward"]
    for category, grows in ((Category.GRADIENTS, True), (Category.ACTIVATIONS, False)):
        first, last = backward[0].get(category, 0), backward[-1].get(category, 0)
        assert (last > first) is grows, category

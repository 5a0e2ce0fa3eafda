"""The engine's streams under every policy: no races, and the losses that it has without them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from fullshard.preflight.races import Kind, check
from support.races.programs import PROGRAMS, Model, loss_of, train

# Nothing differs over replicas but the reduction; the gather of shards over 4 is the same.
_ON_ONE_AXIS = ["plain", "post-forward-mesh", "no-sync", "recovered", "coalesced", "offloaded"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_policy_has_races_over_shards_and_replicas(name: str) -> None:
    report = check(PROGRAMS[name], mesh=(2, 2))
    report.raise_if_any()
    assert {"default", "copy_in", "reduce", "all_reduce"} <= report.operations.keys()


@pytest.mark.parametrize("name", _ON_ONE_AXIS)
def test_nor_over_shards_alone(name: str) -> None:
    report = check(PROGRAMS[name], mesh=4)
    report.raise_if_any()
    assert {"default", "copy_in", "reduce"} <= report.operations.keys()


def test_losses_are_those_of_the_unsharded_model() -> None:
    torch.manual_seed(0)
    model, found = Model(), list[torch.Tensor]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss_of(model))
    watched: list[float] = []
    check(lambda mesh: watched.extend(train(mesh)), mesh=1).raise_if_any()
    assert watched == [loss.item() for loss in found]


def test_an_update_after_the_event_that_gathers_wait_for_is_reported() -> None:
    def late(model: Any) -> None:
        model.set_post_optim_event(torch.get_device_module("cpu").current_stream().record_event())

    report = check(partial(train, before_step=late), mesh=4)
    shards = [race for race in report.races if "(shard)" in race.memory]
    assert shards and {race.kind for race in shards} == {Kind.ACCESS}
    assert {race.second.stream for race in shards} == {"copy_in"}

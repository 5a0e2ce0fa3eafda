"""The engine's streams under every policy: no races, and the losses that it has without them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from fullshard.preflight.races import Kind, RaceError, check
from fullshard.sharding import fully_shard
from support.products import few
from support.races.programs import OPTIONS, PLACED, PROGRAMS, Model, loss_of, train
from support.ranks import cpu_mesh, distributed

# Nothing differs over replicas but the reduction; the gather of shards over 4 is the same.
_ON_ONE_AXIS = [
    "plain",
    "post-forward-mesh",
    "no-sync",
    "recovered",
    "offloaded",
    "lists",
]

_FEW = ["plain", "no-sync-mixed", "offloaded-accumulated", "checkpointed", "by-hand"]


@pytest.mark.parametrize("name", few([*OPTIONS, "gather-hooks"], *_FEW))
def test_no_policy_has_races_over_shards_and_replicas(name: str) -> None:
    report = check(PROGRAMS[name], mesh=(2, 2))
    report.raise_if_any()
    assert {"default", "copy_in", "reduce", "all_reduce"} <= report.operations.keys()


@pytest.mark.parametrize("name", few(PLACED, "zero-2", "two-levels", "two-levels-offloaded"))
def test_no_placements_have_races(name: str) -> None:
    report = check(PROGRAMS[name], mesh=(2, 2))
    report.raise_if_any()
    second = {"all_reduce"} if name.startswith("two-levels") else set()
    assert {"default", "copy_in", "gather", "reduce"} | second <= report.operations.keys()


@pytest.mark.parametrize("name", few(_ON_ONE_AXIS, "plain", "recovered"))
def test_nor_over_shards_alone(name: str) -> None:
    report = check(PROGRAMS[name], mesh=4)
    report.raise_if_any()
    assert {"default", "copy_in", "reduce"} <= report.operations.keys()


_ON_REAL_RANKS = ["own-collectives", "all-to-all", "by-hand", "recovered"]


@distributed(2)
def test_real_ranks_have_the_losses_of_the_unsharded_model_and_no_false_alarms() -> None:
    torch.manual_seed(0)
    model, expected = Model(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss_of(model).item())
    mesh = cpu_mesh(names=("shard",))
    watched: list[float] = []
    report = check(lambda: watched.extend(train(mesh)))
    report.raise_if_any()
    assert {"default", "copy_in", "gather", "reduce"} <= report.operations.keys()
    torch.testing.assert_close(watched, expected)
    for name in _ON_REAL_RANKS:
        check(partial(PROGRAMS[name], mesh)).raise_if_any()
    assert check(partial(train, mesh, before_step=_late)).races
    before = fully_shard(Model(), mesh=mesh)  # on shared memory, as real ranks of one host are
    loss_of(before).backward()
    with torch.no_grad(), pytest.raises(RaceError, match="call fully_shard inside"):
        check(partial(loss_of, before))


def _late(model: Any) -> None:
    model.set_post_optim_event(torch.get_device_module("cpu").current_stream().record_event())


def test_an_update_after_the_event_that_gathers_wait_for_is_reported() -> None:
    report = check(partial(train, before_step=_late), mesh=4)
    shards = [race for race in report.races if "(shard)" in race.memory]
    assert shards and {race.kind for race in shards} == {Kind.ACCESS}
    assert {race.second.stream for race in shards} == {"copy_in"}

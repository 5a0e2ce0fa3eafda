"""Groups that are built otherwise, have one name, or do other things in a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.elastic import Quorum, ReplicaGroupError, ReplicaGroups
from fullshard.elastic.membership import Member, Roster
from fullshard.policies import CanonicalOrder
from fullshard.sharding import fully_shard
from support.elastic.in_world import replica_groups
from support.ranks import distributed


def member(name: str, step: int, **facts: Any) -> Member:
    """A group of the run if it is at a step, and else a new one."""
    given = {"ranks": 1, "batches": 0, "model": "m", "lineage": f"{name}{step}"}
    return Member(name=name, step=step, **{"committed": step > 0, **given, **facts})


A, B, NEW = member("a", 9), member("b", 9), member("c", 0)


@pytest.mark.parametrize(
    ("members", "odd"),
    [
        ([A, B, NEW], ""),
        ([A, B, replace(NEW, model="other")], "2"),
        ([A, replace(NEW, model="other")], "1"),
        # The run stays, however many new groups differ, and whatever a file says.
        ([A, *[replace(NEW, name=name, model="other") for name in "bcd"]], "123"),
        ([A, B, member("c", 1000, model="other", committed=False)], "2"),
        # At the start most groups count, then most steps, then the first group.
        ([member("a", 0, model="other"), member("b", 0), NEW], "0"),
        ([member("a", 0), member("b", 5, committed=False, model="other")], "0"),
        ([member("a", 0), member("b", 0, model="other")], "1"),
        ([A, B, replace(NEW, mesh="two axes")], "2"),
        ([A, B, replace(NEW, ranks=2)], ""),
        ([replace(A, mesh="m"), replace(B, mesh="m"), replace(NEW, mesh="m", ranks=2)], "2"),
        ([A, B, replace(NEW, sums="adds")], "2"),
        ([A, B, member("b", 0)], "2"),
        ([A, member("b", 0), B], "1"),
        # A stopped group comes back when another one has its place.
        ([A, member("b", 4), B], "1"),
        ([member("a", 0), member("b", 0), member("b", 0)], "2"),
        ([A, B, member("b", 0, model="other")], "2"),
    ],
)
def test_only_odd_groups_end_and_the_others_agree_on_who_is_left(
    members: list[Member], odd: str
) -> None:
    names = tuple(map(str, range(len(members))))
    kept = tuple(each for at, each in enumerate(members) if str(at) not in odd)
    for own in range(len(members)):
        quorum = Quorum(number=1, names=names, own=own, store="")
        roster = Roster(quorum=quorum, members=tuple(members), own=own)
        if str(own) in odd:
            with pytest.raises(ReplicaGroupError, match=r"give|build"):
                roster.alike()
        else:
            found = roster.alike()
            assert found.members == kept
            assert found.members[found.own] == members[own]


class Net(nn.Module):
    """Layers, of which the program may skip two."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(8 + 8 * (i % 2), 8 + 8 * ((i + 1) % 2)) for i in range(4)
        )
        self.skips = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for at, layer in enumerate(self.layers):
            if not (self.skips and at in (2, 3)):
                inputs = layer(inputs)
        return inputs


def made(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def carried(groups: ReplicaGroups, mesh: Any) -> Any:
    model = made(0)
    for layer in (*model.layers, model):
        fully_shard(layer, mesh=mesh, wire_policy=groups.wire())
    groups.carry(model, torch.optim.SGD(model.parameters(), lr=0.1))
    groups.load_state_dict({"steps": 0, "batches": 0, "lineage": "of all"})
    return model


def inputs_of(own: int) -> torch.Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(own))


@pytest.mark.parametrize("sizes", [[1, 1, 1], [1, 2]])
@distributed(3)
def test_a_group_that_skips_a_module_ends_all_before_a_message_of_another_size(
    sizes: list[int],
) -> None:
    with replica_groups(sizes) as (groups, mesh, own):
        model = carried(groups, mesh)
        groups.begin()
        model.skips = own == 0
        model(inputs_of(own)).sum().backward()
        told = (
            r"reduction of layers\.(1.*group [bc] is at .*layers\.3|3.*group a is at .*layers\.1)"
        )
        with pytest.raises(ReplicaGroupError, match=told):
            groups.commit()
        dist.barrier()


@pytest.mark.parametrize("sizes", [[1, 1, 1], [1, 2]])
@distributed(3)
def test_with_a_canonical_order_a_group_that_skips_a_module_adds_zeros(sizes: list[int]) -> None:
    with replica_groups(sizes) as (groups, mesh, own):
        model = carried(groups, mesh)
        model.set_schedule(CanonicalOrder())
        groups.begin()
        model.skips = own == 0
        model(inputs_of(own)).sum().backward()
        assert groups.commit()
        total: dict[str, torch.Tensor] = {}
        for place in range(len(sizes)):
            plain = made(0)
            plain.skips = place == 0
            outputs: torch.Tensor = plain(inputs_of(place))
            outputs.sum().backward()
            for name, param in plain.named_parameters():
                part = torch.zeros_like(param) if param.grad is None else param.grad
                total[name] = total.get(name, torch.zeros_like(part)) + part / len(sizes)
        for name, param in model.named_parameters():
            found = param.grad
            assert isinstance(found, DTensor)
            torch.testing.assert_close(found.full_tensor(), total[name])
        dist.barrier()


@pytest.mark.parametrize("sizes", [[1, 1, 1], [1, 2]])
@distributed(3)
def test_a_group_that_ends_its_step_early_drops_it_on_all(sizes: list[int]) -> None:
    with replica_groups(sizes) as (groups, mesh, own):
        model = carried(groups, mesh)
        groups.begin()
        output = model(inputs_of(own))
        if own != 0:
            output.sum().backward()
        assert not groups.commit()
        model.zero_grad()
        groups.begin()
        model(inputs_of(own)).sum().backward()
        assert groups.commit()
        dist.barrier()


@distributed(2)
def test_groups_that_add_other_numbers_are_named() -> None:
    with replica_groups([1, 1]) as (groups, mesh, own):
        carried(groups, mesh)
        groups.begin()
        with pytest.raises(ReplicaGroupError, match=r"of 1 num.*of 2 num|of 2 num.*of 1 num"):
            groups.sum(torch.ones(1 + own))
        dist.barrier()


@distributed(2)
def test_a_group_of_another_model_ends_and_the_other_trains_on() -> None:
    with replica_groups([1, 1]) as (groups, mesh, own):
        model = nn.Sequential(nn.Linear(4, 4 + own))
        fully_shard(model, mesh=mesh, wire_policy=groups.wire())
        groups.carry(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if own == 1:
            with pytest.raises(ReplicaGroupError, match="b and a differ"):
                groups.begin()
            return
        assert groups.begin().contributors == ("a",)
        model(torch.ones(1, 4)).sum().backward()
        assert groups.commit()

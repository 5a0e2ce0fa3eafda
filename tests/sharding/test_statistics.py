"""``statistics()``: sizes against their definition, counts against a step, and the table."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fullshard.comm import EventKind, EventLog, observe
from fullshard.policies import MixedPrecisionPolicy
from fullshard.sharding import fully_shard
from support.ranks import distributed


def build(**arguments: Any) -> Any:
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    fully_shard(net[0], **arguments)
    return fully_shard(net, **arguments)


def step(net: Any) -> None:
    net(torch.ones(4, 3)).float().sum().backward()
    net.zero_grad()


@distributed(2)
def test_the_sizes_are_those_of_the_shards_and_of_the_full_parameters() -> None:
    net = build()
    root, first = net.statistics().groups
    assert (first.name, first.parameters) == ("0", 2)
    assert (root.name, root.parameters) == ("(root)", 2)
    shards = [param.to_local() for param in net[0].parameters()]
    assert first.sharded_bytes == sum(shard.nbytes for shard in shards)
    assert first.gathered_bytes == (3 * 5 + 5) * 4
    # each rank sends three rows of the weight and three elements of the bias: 48 bytes, no more
    assert first.padding_bytes == 2 * (3 * 3 + 3) * 4 - first.gathered_bytes


@distributed(2)
def test_gathered_bytes_follow_the_dtype_of_the_gather() -> None:
    half = build(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)).statistics()
    full = build().statistics()
    assert half.total.gathered_bytes * 2 == full.total.gathered_bytes
    assert half.total.sharded_bytes == full.total.sharded_bytes


@distributed(2)
def test_collectives_per_step_are_those_that_the_observer_sees() -> None:
    net = build()
    step(net)
    net.reset_statistics()
    log = EventLog()
    with observe(log):
        for _ in range(3):
            step(net)
    statistics = net.statistics()
    assert statistics.steps == 3
    assert statistics.total.gathers * 3 == len(log.of(EventKind.UNSHARD)) > 0
    assert statistics.total.reductions * 3 == len(log.of(EventKind.REDUCE)) == 6
    assert statistics.total.host_us > 0


@distributed(2)
def test_a_reset_starts_from_zero() -> None:
    net = build()
    step(net)
    net.reset_statistics()
    total = net.statistics().total
    assert (total.gathers, total.reductions, total.host_us) == (0, 0, 0)


@distributed(2)
def test_the_table_has_a_row_per_group_and_the_total() -> None:
    net = build()
    step(net)
    statistics = net.statistics()
    lines = str(statistics).splitlines()
    assert lines[0].split()[:4] == ["group", "parameters", "sharded", "gathered"]
    assert [line.split()[0] for line in lines[2:4]] == ["(root)", "0"]
    assert lines[-2].startswith("total of 2 groups")
    assert lines[-1] == "steps: 1"
    assert len({len(line) for line in lines[:-1]}) == 1, "columns line up"


@distributed(2)
def test_the_statistics_of_an_inner_module_are_those_of_its_own_groups() -> None:
    net = build()
    step(net)
    (only,) = net[0].statistics().groups
    assert only == net.statistics().groups[1]

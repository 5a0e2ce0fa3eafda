"""``statistics()`` of a sharded model: sizes, collectives per step, and the table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fullshard.comm import EventKind, EventLog, observe
from fullshard.insight import reset_statistics, statistics
from fullshard.policies import MixedPrecisionPolicy
from fullshard.sharding import fully_shard
from support.ranks import distributed


def two_layers(**arguments: Any) -> Any:
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    fully_shard(net[0], **arguments)
    return fully_shard(net, **arguments)


def one_step(net: Any) -> None:
    net(torch.ones(4, 3)).float().sum().backward()
    net.zero_grad()


@distributed(2)
def test_the_sizes_are_those_of_the_shards_and_of_the_full_parameters() -> None:
    net = two_layers()
    root, first = statistics(net).groups
    assert statistics(net[0]).groups == (first,), "of an inner module: its own groups"
    assert (first.name, first.parameters) == ("0", 2)
    assert (root.name, root.parameters) == ("(root)", 2)
    shards = [param.to_local() for param in net[0].parameters()]
    assert first.sharded_bytes == sum(shard.nbytes for shard in shards)
    assert first.gathered_bytes == (3 * 5 + 5) * 4
    # each rank sends three rows of the weight and three elements of the bias: 48 bytes, no more
    assert first.padding_bytes == 2 * (3 * 3 + 3) * 4 - first.gathered_bytes


@distributed(2)
def test_gathered_bytes_follow_the_dtype_of_the_gather() -> None:
    half = statistics(two_layers(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)))
    full = statistics(two_layers())
    assert half.total.gathered_bytes * 2 == full.total.gathered_bytes
    assert half.total.sharded_bytes == full.total.sharded_bytes


@distributed(2)
def test_collectives_per_step_are_those_that_the_observer_sees() -> None:
    net = two_layers()
    one_step(net)
    reset_statistics(net)
    total = statistics(net).total
    assert (total.gathers, total.reductions, total.host_us) == (0, 0, 0)
    log = EventLog()
    with observe(log):
        for _ in range(3):
            one_step(net)
    found = statistics(net)
    assert found.steps == 3
    assert found.total.gathers * 3 == len(log.of(EventKind.UNSHARD)) > 0
    assert found.total.reductions * 3 == len(log.of(EventKind.REDUCE)) == 6
    assert found.total.host_us > 0


@distributed(2)
def test_the_table_has_a_row_per_group_and_the_total() -> None:
    net = two_layers()
    one_step(net)
    found = statistics(net)
    lines = str(found).splitlines()
    assert lines[0].split()[:4] == ["group", "parameters", "sharded", "gathered"]
    assert [line.split()[0] for line in lines[2:4]] == ["(root)", "0"]
    assert lines[-2].startswith("total of 2 groups")
    assert lines[-1] == "steps: 1"
    assert len({len(line) for line in lines[:-1]}) == 1, "columns line up"


@distributed(2)
def test_a_wrong_argument_is_an_error_that_names_it() -> None:
    plain, net = nn.Linear(3, 5), two_layers()
    for call in (statistics, reset_statistics):
        with pytest.raises(TypeError, match=f"{call.__name__}.*Linear.*fully_shard"):
            call(plain)
    with pytest.raises(TypeError, match=r"slow_ranks.*True"):
        statistics(net, slow_ranks=True)  # type: ignore[arg-type]  # that is the fault

"""``statistics()``, and the named ranges that ``torch.profiler`` shows of a step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fullshard.comm import EventKind, EventLog, observe
from fullshard.policies import MixedPrecisionPolicy
from fullshard.sharding import fully_shard
from support.events.models import make_inputs, make_net
from support.events.recorder import ours
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
    root, first = net.statistics().groups
    assert net[0].statistics().groups == (first,), "of an inner module: its own groups"
    assert (first.name, first.parameters) == ("0", 2)
    assert (root.name, root.parameters) == ("(root)", 2)
    shards = [param.to_local() for param in net[0].parameters()]
    assert first.sharded_bytes == sum(shard.nbytes for shard in shards)
    assert first.gathered_bytes == (3 * 5 + 5) * 4
    # each rank sends three rows of the weight and three elements of the bias: 48 bytes, no more
    assert first.padding_bytes == 2 * (3 * 3 + 3) * 4 - first.gathered_bytes


@distributed(2)
def test_gathered_bytes_follow_the_dtype_of_the_gather() -> None:
    half = two_layers(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)).statistics()
    full = two_layers().statistics()
    assert half.total.gathered_bytes * 2 == full.total.gathered_bytes
    assert half.total.sharded_bytes == full.total.sharded_bytes


@distributed(2)
def test_collectives_per_step_are_those_that_the_observer_sees() -> None:
    net = two_layers()
    one_step(net)
    net.reset_statistics()
    total = net.statistics().total
    assert (total.gathers, total.reductions, total.host_us) == (0, 0, 0)
    log = EventLog()
    with observe(log):
        for _ in range(3):
            one_step(net)
    statistics = net.statistics()
    assert statistics.steps == 3
    assert statistics.total.gathers * 3 == len(log.of(EventKind.UNSHARD)) > 0
    assert statistics.total.reductions * 3 == len(log.of(EventKind.REDUCE)) == 6
    assert statistics.total.host_us > 0


@distributed(2)
def test_the_table_has_a_row_per_group_and_the_total() -> None:
    net = two_layers()
    one_step(net)
    statistics = net.statistics()
    lines = str(statistics).splitlines()
    assert lines[0].split()[:4] == ["group", "parameters", "sharded", "gathered"]
    assert [line.split()[0] for line in lines[2:4]] == ["(root)", "0"]
    assert lines[-2].startswith("total of 2 groups")
    assert lines[-1] == "steps: 1"
    assert len({len(line) for line in lines[:-1]}) == 1, "columns line up"


# -- ranges of a profile, as of torch's own --------------------------------------------------------


SHARED = (
    "FSDP::pre_forward",
    "FSDP::post_forward",
    "FSDP::pre_backward",
    "FSDP::post_backward_reduce",
    "FSDP::all_gather",
    "FSDP::root_post_backward_callback",
)


def ranges_of_a_step(net: nn.Module) -> Counter[str]:
    """How often each range of a steady step appears; a range has a parenthesis with a name."""
    for _ in range(2):
        net(make_inputs(0)).sum().backward()
    # acc_events: without it, torch 2.11 warns that one profile's events are not added to another's.
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        net(make_inputs(0)).sum().backward()
    names = [event.name for event in profiler.events() if event.name.startswith("FSDP::")]
    return Counter(name for name in names if name.partition(" (")[0] in SHARED)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@distributed(2)
def test_a_profiled_step_has_the_ranges_of_torchs_own() -> None:
    expected = ranges_of_a_step(make_net(torch_fsdp.fully_shard))
    assert {name.partition(" (")[0] for name in expected} == set(SHARED)
    assert ranges_of_a_step(make_net(ours)) == expected

"""The named ranges that ``torch.profiler`` shows of a step, as of torch's own."""

from __future__ import annotations

from collections import Counter

import pytest
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.profiler import ProfilerActivity, profile

from support.events.models import make_inputs, make_net
from support.events.recorder import ours
from support.ranks import distributed

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

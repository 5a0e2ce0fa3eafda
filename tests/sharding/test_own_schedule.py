"""A schedule of the user's own decides when the groups of a root communicate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fullshard.comm import EventKind, EventLog, observe
from fullshard.sharding import FSDPParamGroup, Schedule, fully_shard
from fullshard.sharding.spi import ReductionQueue, ShardedModule, StepRecord
from support.ranks import distributed


class AllAtOnce(Schedule):
    """The first gather of a forward gathers all groups, in the order of their modules."""

    groups: Sequence[FSDPParamGroup]
    backward = False

    def take_over(
        self, states: Sequence[ShardedModule], record: StepRecord, queue: ReductionQueue
    ) -> None:
        super().take_over(states, record, queue)
        self.groups = [group for state in states for group in state.groups]

    def begin(self, *, backward: bool) -> None:
        super().begin(backward=backward)
        self.backward = backward

    def unshard(self, group: FSDPParamGroup) -> None:
        super().unshard(group)
        for each in () if self.backward else self.groups:
            self.prefetch(each)


@distributed(2)
def test_it_is_asked_and_the_gradients_are_those_of_the_default() -> None:
    gathers, gradients = [], []
    for schedule in (None, AllAtOnce()):
        torch.manual_seed(0)
        model: Any = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        for layer in model:
            fully_shard(layer, reshard_after_forward=False)
        fully_shard(model)
        model.set_schedule(schedule)
        log = EventLog()
        with observe(log):
            model(torch.ones(2, 4)).sum().backward()
        order = [(each.kind, each.name) for each in log.events]
        first = order.index((EventKind.PRE_FORWARD, "1"))
        gathers.append([name for kind, name in order[:first] if kind is EventKind.ALL_GATHER])
        gradients.append([param.grad.full_tensor() for param in model.parameters()])
    assert gathers == [["0"], ["0", "1", "2"]]
    for mine, default in zip(*gradients, strict=True):
        assert torch.equal(mine, default)

"""Collectives that users wrote for torch's interface give the bits of the defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.comm import AllGather, ReduceScatter
from support.collectives import Allocates
from support.parity.compare import EXACT, rounding
from support.parity.engines import OURS, TORCH, Engine, shard, tell
from support.parity.models import CASES
from support.parity.reference import History, compare, my_rows, train
from support.products import few
from support.ranks import distributed


class Counted(Allocates):
    """Counts calls and allocations."""

    def __init__(self) -> None:
        self.calls = self.allocated = 0

    def allocate(self, size: Sequence[int | torch.SymInt], **options: Any) -> torch.Tensor:
        self.allocated += 1
        return super().allocate(size, **options)


class PointToPointGather(Counted):
    """An all-gather of broadcasts, with torch's signatures and no base class of an interface."""

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> None:
        self.calls += 1
        mine = input_tensor.clone()
        for rank, part in enumerate(output_tensor.chunk(group.size())):
            if rank == group.rank():
                part.copy_(mine)
            dist.broadcast(part, group_src=rank, group=group)


class SummingScatter(Counted):
    """A reduce-scatter of gathers, added in rank order."""

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self.calls += 1
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        everyone = [torch.empty_like(input_tensor) for _ in range(group.size())]
        dist.all_gather(everyone, input_tensor, group=group)
        total = everyone[0]
        for more in everyone[1:]:
            total = total + more
        if op == dist.ReduceOp.AVG:
            total = total / group.size()
        output_tensor.copy_(total.chunk(group.size())[group.rank()])


class DerivedGather(PointToPointGather, AllGather):
    """The same, derived from our interface."""


class DerivedScatter(SummingScatter, ReduceScatter):
    """The same, derived from our interface."""


def _use(model: nn.Module, gather: Counted, scatter: Counted) -> nn.Module:
    for module in model.modules():
        tell(module, "set_custom_all_gather", gather)
        tell(module, "set_custom_reduce_scatter", scatter)
    return model


def _trained(name: str, engine: Engine, *collectives: Counted) -> History:
    model = shard(CASES[name], engine)
    return train(
        _use(model, *collectives) if collectives else model, CASES[name], my_rows(), steps=3
    )


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.cross
@pytest.mark.parametrize("derived", [False, True])
@pytest.mark.parametrize("name", few(["transformer", "uneven"], "transformer"))
@distributed(2, 4, matrix=[4])
def test_custom_collectives_train_like_the_defaults_and_give_torchs_bits(
    name: str, derived: bool, world_size: int
) -> None:
    gather = DerivedGather() if derived else PointToPointGather()
    scatter = DerivedScatter() if derived else SummingScatter()
    got = _trained(name, OURS, gather, scatter)
    slack = EXACT if world_size == 2 else rounding(world_size)
    compare(got, _trained(name, OURS), slack, average=False, grow=world_size > 2)
    assert min(gather.calls, scatter.calls, gather.allocated, scatter.allocated) > 0
    # a reduction that adds in rank order leaves nothing to the backend, on any number of ranks
    torchs = _trained(name, TORCH, PointToPointGather(), SummingScatter())
    compare(got, torchs, EXACT, average=False)


@distributed(2)
def test_only_the_module_that_was_told_uses_a_custom_collective() -> None:
    model = shard(CASES["uneven"])
    gather, scatter = PointToPointGather(), SummingScatter()
    tell(model.get_submodule("second"), "set_custom_all_gather", gather)
    tell(model.get_submodule("second"), "set_custom_reduce_scatter", scatter)
    train(model, CASES["uneven"], my_rows(), steps=3)
    assert (gather.calls, scatter.calls) == (6, 3)  # before forward and backward; after backward

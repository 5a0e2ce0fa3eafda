"""Collectives that users wrote for torch's interface give the bits of the defaults."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.comm import AllGather, ReduceScatter
from support.parity.compare import EXACT, rounding
from support.parity.engines import OURS, TORCH, shard, tell
from support.parity.models import CASES
from support.parity.reference import compare, my_rows, train
from support.ranks import distributed


class PointToPointGather:
    """An all-gather of broadcasts, with torch's signatures and no base class."""

    def __init__(self) -> None:
        self.calls = 0
        self.allocated = 0

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        self.allocated += 1
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.calls += 1
        mine = input_tensor.clone()
        for rank, part in enumerate(output_tensor.chunk(group.size())):
            if rank == group.rank():
                part.copy_(mine)
            dist.broadcast(part, group_src=rank, group=group)
        return None


class SummingScatter:
    """A reduce-scatter of gathers, added in rank order."""

    def __init__(self) -> None:
        self.calls = 0
        self.allocated = 0

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        self.allocated += 1
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
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
        return None


class DerivedGather(PointToPointGather, AllGather):
    """The same, derived from our interface."""


class DerivedScatter(SummingScatter, ReduceScatter):
    """The same, derived from our interface."""


def _use(model: nn.Module, gather: PointToPointGather, scatter: SummingScatter) -> nn.Module:
    for module in model.modules():
        tell(module, "set_custom_all_gather", gather)
        tell(module, "set_custom_reduce_scatter", scatter)
    return model


@pytest.mark.cross
@pytest.mark.parametrize("derived", [False, True])
@pytest.mark.parametrize("name", ["uneven", "transformer"])
@distributed(2, 4)
def test_custom_collectives_train_like_the_defaults(
    name: str, derived: bool, world_size: int
) -> None:
    gather = DerivedGather() if derived else PointToPointGather()
    scatter = DerivedScatter() if derived else SummingScatter()
    got = train(_use(shard(CASES[name]), gather, scatter), CASES[name], my_rows(), steps=3)
    want = train(shard(CASES[name]), CASES[name], my_rows(), steps=3)
    slack = EXACT if world_size == 2 else rounding(world_size)
    compare(got, want, slack, average=False, grow=world_size > 2)
    assert gather.calls > 0
    assert scatter.calls > 0
    assert gather.allocated > 0
    assert scatter.allocated > 0


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@distributed(2, 4)
def test_one_order_of_additions_gives_torchs_bits_on_any_number_of_ranks() -> None:
    """A reduction that adds in rank order leaves nothing to the backend."""
    runs = [
        train(
            _use(shard(CASES["transformer"], engine), PointToPointGather(), SummingScatter()),
            CASES["transformer"],
            my_rows(),
            steps=3,
        )
        for engine in (OURS, TORCH)
    ]
    compare(runs[0], runs[1], EXACT, average=False)


@distributed(2)
def test_only_the_module_that_was_told_uses_a_custom_collective() -> None:
    model = shard(CASES["uneven"])
    gather, scatter = PointToPointGather(), SummingScatter()
    tell(model.get_submodule("second"), "set_custom_all_gather", gather)
    tell(model.get_submodule("second"), "set_custom_reduce_scatter", scatter)
    train(model, CASES["uneven"], my_rows(), steps=3)
    assert (gather.calls, scatter.calls) == (6, 3)  # before forward and backward; after backward

"""How tensors are cut over several axes, against what ``distribute_tensor`` makes of them."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from fullshard.checkpoint.boxes import box_of
from fullshard.checkpoint.transfer import gathered
from fullshard.sharding.base.compat import strided_shard
from support.products import few
from support.ranks import cpu_mesh, distributed

CUTS: list[tuple[Placement, ...]] = [
    *itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2),
    (strided_shard(0, 2), Shard(0)),
    (strided_shard(1, 2), Shard(1)),
]


def _each_cut(rows: int) -> list[tuple[torch.Tensor, DTensor]]:
    """A whole tensor, and it cut over a mesh of two axes in each way."""
    mesh = cpu_mesh((2, 2), ("outer", "inner"))
    full = torch.arange(rows * 6.0).view(rows, 6)
    return [(full, distribute_tensor(full, mesh, cut, src_data_rank=None)) for cut in CUTS]


@pytest.mark.parametrize("rows", few([8, 5, 1, 0], 5, 0))
@distributed(4)
def test_a_ranks_part_is_the_one_that_distribute_tensor_gives_it(rows: int) -> None:
    for full, tensor in _each_cut(rows):
        assert torch.equal(box_of(tensor).of(full), tensor.to_local()), tensor.placements


@pytest.mark.parametrize("rows", [8, 5, 1, 0])
@distributed(4)
def test_parts_come_together_on_any_one_rank_alone(rows: int) -> None:
    for full, tensor in _each_cut(rows):
        for first in range(4):
            found = gathered(tensor, first)
            if dist.get_rank() == first:
                assert found is not None and torch.equal(found, full), tensor.placements
            else:
                assert found is None

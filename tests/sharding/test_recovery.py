"""What is half done is never lost and never stays half done: partial reductions, failed gathers."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.sharding import fully_shard, gathering
from support.ranks import cpu_mesh, distributed


@distributed(4)
def test_partial_reductions_of_a_backward_that_did_not_wait_reach_the_next_all_reduce() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(3, 4)
    net: Any = fully_shard(copy.deepcopy(plain), mesh=cpu_mesh((2, 2), ("replicate", "shard")))
    batches = torch.randn(2, dist.get_world_size(), 5, 3)
    for micro, last in enumerate((False, True)):
        net.set_requires_all_reduce(last)
        net.set_is_last_backward(last)
        net(batches[micro, dist.get_rank()]).sum().backward()
    for micro in range(2):
        (plain(batches[micro]).sum() / dist.get_world_size()).backward()
    for param, whole in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), whole.grad)


@distributed(2)
def test_a_copy_out_that_raises_on_every_rank_leaves_a_model_that_can_be_reset() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(3, 4)
    net: Any = fully_shard(copy.deepcopy(plain))
    batch = torch.ones(2, 3)
    net(batch)
    net.reshard()
    failure = mock.patch.object(
        gathering, "foreach_all_gather_copy_out", side_effect=RuntimeError("no memory")
    )
    with failure, pytest.raises(RuntimeError, match="no memory"):
        net(batch)
    net.reset_iter_state()
    torch.testing.assert_close(net(batch), plain(batch))

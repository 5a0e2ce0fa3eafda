"""``fully_shard`` through shared memory: sums in rank order, what travels, and ranks that end.

That training is right through it, which is the default on one host, is in ``tests/parity``.
"""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.comm import (
    DefaultAllGather,
    DefaultReduceScatter,
    EventKind,
    EventLog,
    ProcessGroupTransport,
    SharedMemoryTransport,
    observe,
)
from fullshard.comm.same_host.shared_group import shared_group
from fullshard.sharding import FSDPModule, fully_shard
from support.products import few
from support.ranks import RanksFailed, cpu_mesh, distributed, run_on_ranks, world
from support.wide.model import gradients_by_ranks, loss_of, make_batch, make_stack


def through(transport: Any, model: Any) -> Any:
    """Every collective of ``model`` through a transport."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(DefaultAllGather(transport=transport))
            module.set_custom_reduce_scatter(DefaultReduceScatter(transport=transport))
    return model


TRANSPORTS = (SharedMemoryTransport(), ProcessGroupTransport())


@distributed(2, 4)
def test_gradients_are_added_in_rank_order_to_the_bit(world_size: int) -> None:
    model = make_stack()
    parts = make_batch(world_size, 0).chunk(world_size)
    wanted = gradients_by_ranks(model, parts)
    for block in model.blocks:
        fully_shard(block, mesh=cpu_mesh())
    through(TRANSPORTS[0], fully_shard(model, mesh=cpu_mesh()))
    loss_of(model, parts[dist.get_rank()]).backward()
    for param, total in zip(model.parameters(), wanted, strict=True):
        assert isinstance(param.grad, torch.distributed.tensor.DTensor)
        assert torch.equal(param.grad.full_tensor(), total)


@distributed(2)
def test_the_collectives_are_those_of_the_default_and_went_through_the_segment() -> None:
    logs = []
    for transport in TRANSPORTS:
        model = make_stack()
        for block in model.blocks:
            fully_shard(block, mesh=cpu_mesh())
        through(transport, fully_shard(model, mesh=cpu_mesh()))
        group = world()
        batch = make_batch(2, 0).chunk(2)[dist.get_rank()]
        loss_of(model, batch).backward()  # ranks compare their models first, in the segment, too
        before = shared_group(group).launched
        log = EventLog()
        with observe(log):
            loss_of(model, batch).backward()
        events = log.of(EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER)
        logs.append([(event.kind, event.name) for event in events])
        assert shared_group(group).launched - before == (
            len(events) if transport is TRANSPORTS[0] else 0
        )
    assert logs[0] == logs[1]


def _rank_1_dies_in_the_second_step(phase: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (*model, model):
        fully_shard(module, mesh=cpu_mesh())
    model(torch.ones(2, 4)).sum().backward()
    if phase == "backward":
        loss = model(torch.ones(2, 4)).sum()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    (loss.backward if phase == "backward" else lambda: model(torch.ones(2, 4)))()


@pytest.mark.parametrize(
    ("phase", "where"),
    few(
        [("forward", "the gather of 0"), ("backward", "the (gather|reduction) of 1")],
        ("backward", "the (gather|reduction) of 1"),
        together=True,
    ),
)
def test_where_a_rank_waited_for_one_that_was_killed_is_named(phase: str, where: str) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(_rank_1_dies_in_the_second_step, 2, phase, fresh=True)
    text = caught.value.reports[0].text
    assert re.search(rf"PeerLostError: rank 1 .*This rank was in {where}\.", text), text

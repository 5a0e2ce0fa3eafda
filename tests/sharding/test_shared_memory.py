"""``fully_shard`` through shared memory, beside the process group's own transport and no sharding.

Between two ranks both transports add the same two numbers, so nothing may differ; among four the
order of additions is ours, the ranks', which is also that of the definition.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
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
from fullshard.policies import MixedPrecisionPolicy
from fullshard.sharding import FSDPModule, fully_shard
from support.parity.compare import EXACT, parameters_of, rounding
from support.parity.engines import OURS, shard
from support.parity.models import CASES
from support.parity.reference import compare, my_rows, train
from support.products import few
from support.ranks import RanksFailed, cpu_mesh, distributed, run_on_ranks
from support.wide.model import gradients_by_ranks, loss_of, make_batch, make_stack


def through(transport: Any, model: Any) -> Any:
    """Every collective of ``model`` through a transport."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(DefaultAllGather(transport=transport))
            module.set_custom_reduce_scatter(DefaultReduceScatter(transport=transport))
    return model


TRANSPORTS = (SharedMemoryTransport(), ProcessGroupTransport())


def _hybrid() -> dict[str, Any]:
    return {"mesh": cpu_mesh((2, 2), ("replicate", "shard"))}


def _mixed(
    param: torch.dtype | None, reduce: torch.dtype | None = None
) -> Callable[[], dict[str, Any]]:
    return lambda: {"mp_policy": MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)}


BF16 = torch.bfloat16
PROGRAMS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    **{name: (name, dict) for name in sorted(CASES.keys() - {"many-dtypes"})},
    "many-dtypes": ("many-dtypes", lambda: {"dtype": None}),  # those it has
    "bf16-fp32": ("transformer", _mixed(BF16, torch.float32)),
    "bf16": ("transformer", _mixed(BF16)),
    "fp16": ("transformer", _mixed(None, torch.float16)),
    "kept": ("transformer", lambda: {"reshard_after_forward": False}),
    "hybrid": ("transformer", _hybrid),
    "post-forward mesh": ("transformer", lambda: {"reshard_after_forward": 2}),
}
FOUR = ("transformer", "uneven", "many-dtypes", "kept", "hybrid", "post-forward mesh")


@pytest.mark.parametrize(
    ("program", "ranks"),
    few(
        [(name, 2) for name in PROGRAMS if name not in FOUR[-2:]] + [(name, 4) for name in FOUR],
        *(
            (name, 2)
            for name in ("uneven", "tied-across-groups", "lora", "many-dtypes", "bf16-fp32", "kept")
        ),
        *((name, 4) for name in ("uneven", "hybrid", "post-forward mesh")),
        together=True,
    ),
)
def test_no_bit_differs_from_the_process_groups_transport_but_by_the_order_of_more_additions(
    program: str, ranks: int
) -> None:
    run_on_ranks(_both, ranks, program)


def _both(program: str) -> None:
    name, options = PROGRAMS[program]
    shared, gloo = (
        train(
            through(transport, shard(CASES[name], OURS, **options())),
            CASES[name],
            my_rows(),
            steps=3,
        )
        for transport in TRANSPORTS
    )
    world_size = dist.get_world_size()
    slack = EXACT if world_size == 2 else rounding(world_size)
    compare(shared, gloo, slack, average=False, grow=world_size > 2)


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
def test_every_group_of_a_model_may_be_in_flight_at_once() -> None:
    """All are unsharded asynchronously, then used; gathers and reductions lie side by side."""
    histories = []
    for transport in TRANSPORTS:
        model = make_stack(blocks=12)
        for block in model.blocks:
            fully_shard(block, mesh=cpu_mesh())
        through(transport, fully_shard(model, mesh=cpu_mesh()))
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard(async_op=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            model.set_requires_gradient_sync(step != 2)  # type: ignore[operator]  # it is sharded
            loss_of(model, make_batch(2, step).chunk(2)[dist.get_rank()]).backward()
            if step != 2:
                optimizer.step()
                optimizer.zero_grad()
        histories.append(parameters_of(model))
    for name, value in histories[0].items():
        other = histories[1][name]
        assert value is not None
        assert other is not None
        assert torch.equal(value, other)


@distributed(2)
def test_the_collectives_are_those_of_the_default_and_went_through_the_segment() -> None:
    logs = []
    for transport in TRANSPORTS:
        model = make_stack()
        for block in model.blocks:
            fully_shard(block, mesh=cpu_mesh())
        through(transport, fully_shard(model, mesh=cpu_mesh()))
        group = dist.group.WORLD
        assert group is not None
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

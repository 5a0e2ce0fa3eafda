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
from torch.distributed.device_mesh import DeviceMesh

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
from support.parity.models import CASES, build
from support.parity.reference import compare, my_rows, train, whole_batch
from support.ranks import RanksFailed, cpu_mesh, distributed, run_on_ranks
from support.wide.model import gradients_by_ranks, loss_of, make_batch, make_stack

SHARED = SharedMemoryTransport()


def share(model: nn.Module) -> nn.Module:
    """Every collective of ``model`` through shared memory."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(DefaultAllGather(transport=SHARED))
            module.set_custom_reduce_scatter(DefaultReduceScatter(transport=SHARED))
    return model


def separate(model: nn.Module) -> nn.Module:
    """Every collective of ``model`` through the process group."""
    own = ProcessGroupTransport()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(DefaultAllGather(transport=own))
            module.set_custom_reduce_scatter(DefaultReduceScatter(transport=own))
    return model


def both(name: str, *, steps: int = 3, **options: Any) -> list[Any]:
    """The same training through shared memory and through the process group."""
    if name == "many-dtypes":
        options["dtype"] = None  # those it has
    return [
        train(wrap(shard(CASES[name], OURS, **options)), CASES[name], my_rows(), steps=steps)
        for wrap in (share, separate)
    ]


@pytest.mark.parametrize("name", sorted(CASES))
@distributed(2)
def test_no_bit_differs_from_the_process_groups_transport(name: str) -> None:
    shared, gloo = both(name)
    compare(shared, gloo, EXACT, average=False)


@pytest.mark.parametrize("name", ["uneven", "transformer", "many-dtypes"])
@distributed(4)
def test_among_four_ranks_only_rounding_differs(name: str, world_size: int) -> None:
    shared, gloo = both(name)
    compare(shared, gloo, rounding(world_size), average=False)


@pytest.mark.cross
@pytest.mark.parametrize("name", ["uneven", "transformer", "tied-across-groups"])
@distributed(2, 4)
def test_training_equals_the_unsharded_model_on_the_whole_batch(name: str, world_size: int) -> None:
    case = CASES[name]
    sharded = train(share(shard(case)), case, my_rows(), steps=3)
    plain = train(build(case, torch.float32), case, whole_batch, steps=3)
    compare(sharded, plain, rounding(world_size), average=True)


@distributed(2, 4)
def test_gradients_are_added_in_rank_order_to_the_bit(world_size: int) -> None:
    model = make_stack()
    parts = make_batch(world_size, 0).chunk(world_size)
    wanted = gradients_by_ranks(model, parts)
    for block in model.blocks:
        fully_shard(block, mesh=cpu_mesh())
    share(fully_shard(model, mesh=cpu_mesh()))
    loss_of(model, parts[dist.get_rank()]).backward()
    for param, total in zip(model.parameters(), wanted, strict=True):
        assert isinstance(param.grad, torch.distributed.tensor.DTensor)
        assert torch.equal(param.grad.full_tensor(), total)


@pytest.mark.parametrize(
    "policy",
    [
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        MixedPrecisionPolicy(reduce_dtype=torch.float16),
    ],
    ids=["bf16-fp32", "bf16", "fp16"],
)
@distributed(2)
def test_mixed_precision_differs_in_no_bit(policy: MixedPrecisionPolicy) -> None:
    shared, gloo = both("transformer", mp_policy=policy)
    compare(shared, gloo, EXACT, average=False)


def _hybrid() -> DeviceMesh:
    return cpu_mesh((2, 2), ("replicate", "shard"))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(lambda: {"mesh": _hybrid()}, id="hybrid"),
        pytest.param(lambda: {"reshard_after_forward": 2}, id="post-forward mesh"),
        pytest.param(lambda: {"reshard_after_forward": False}, id="kept"),
    ],
)
@distributed(4)
def test_sub_groups_share_memory_of_their_own(
    options: Callable[[], dict[str, Any]], world_size: int
) -> None:
    shared, gloo = both("transformer", **options())
    compare(shared, gloo, rounding(world_size), average=False)


@distributed(2)
def test_every_group_of_a_model_may_be_in_flight_at_once() -> None:
    """All are unsharded asynchronously, then used; gathers and reductions lie side by side."""
    histories = []
    for wrap in (share, separate):
        model = make_stack(blocks=12)
        for block in model.blocks:
            fully_shard(block, mesh=cpu_mesh())
        wrap(fully_shard(model, mesh=cpu_mesh()))
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard(async_op=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            loss_of(model, make_batch(2, step).chunk(2)[dist.get_rank()]).backward()
            optimizer.step()
            optimizer.zero_grad()
        histories.append(parameters_of(model))
    for name, value in histories[0].items():
        other = histories[1][name]
        assert value is not None
        assert other is not None
        assert torch.equal(value, other)


@distributed(2)
def test_accumulation_without_communication_then_with_differs_in_no_bit() -> None:
    results = []
    for wrap in (share, separate):
        model = make_stack()
        wrap(fully_shard(model, mesh=cpu_mesh()))
        for step in range(3):
            model.set_requires_gradient_sync(step == 2)  # type: ignore[operator]  # it is sharded
            loss_of(model, make_batch(2, step).chunk(2)[dist.get_rank()]).backward()
        results.append([param.grad for param in model.parameters()])
    for mine, theirs in zip(*results, strict=True):
        assert isinstance(mine, torch.distributed.tensor.DTensor)
        assert isinstance(theirs, torch.distributed.tensor.DTensor)
        assert torch.equal(mine.to_local(), theirs.to_local())


@distributed(2)
def test_the_collectives_are_those_of_the_default_and_went_through_the_segment() -> None:
    logs = []
    for wrap in (share, separate):
        model = make_stack()
        for block in model.blocks:
            fully_shard(block, mesh=cpu_mesh())
        wrap(fully_shard(model, mesh=cpu_mesh()))
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
        assert shared_group(group).launched - before == (len(events) if wrap is share else 0)
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
    [("forward", "the gather of 0"), ("backward", "the (gather|reduction) of 1")],
)
def test_where_a_rank_waited_for_one_that_was_killed_is_named(phase: str, where: str) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(_rank_1_dies_in_the_second_step, 2, phase, fresh=True)
    text = caught.value.reports[0].text
    assert re.search(rf"PeerLostError: rank 1 .*This rank was in {where}\.", text), text

"""Full parameters in memory that ranks share: who sees what, sums in rank order, ranks that end.

That training is right through it, which is the default on one host, is in ``tests/parity``.
"""

from __future__ import annotations

import gc
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

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
    observe,
)
from fullshard.samehost import SharedMemoryTransport
from fullshard.samehost.group import shared_group
from fullshard.samehost.segment import SegmentFile
from fullshard.sharding import FSDPModule, fully_shard, unsharded
from support.products import few
from support.ranks import RanksFailed, cpu_mesh, distributed, run_on_ranks, world
from support.surface.ranks import everyone
from support.wide.model import loss_of, make_batch, make_stack


def make(**options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4, bias=False))
    for layer in (model[0], model[2], model):
        fully_shard(layer, **options)
    return model


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(seed + dist.get_rank()))


def in_turn(rank: int) -> bool:
    """Whether it is this rank's turn, after all came here."""
    dist.barrier()
    return dist.get_rank() == rank


def poke(weight: torch.Tensor) -> list[float]:
    """What every rank sees in the first element once rank 0 has changed it."""
    before = weight.detach()[0, 0].item()
    if in_turn(0):
        with torch.no_grad():
            weight[0, 0] = 123.0
    dist.barrier()
    return [before, weight.detach()[0, 0].item()]


def seen_by_rank_1(pair: list[float]) -> bool:
    """Whether rank 1 saw the change that rank 0 made."""
    (_, written), (before, after) = everyone(pair)
    assert before != 123.0 and written == 123.0
    return bool(after == 123.0)


@distributed(2)
def test_in_forward_all_ranks_look_at_the_same_memory() -> None:
    model, seen = make(), []
    model[2].register_forward_pre_hook(lambda layer, args: seen.append(poke(layer.weight)))
    with torch.no_grad():
        model(batch())
    assert seen_by_rank_1(seen[0])


@pytest.mark.parametrize("how", ["unshard", "asynchronously", "block", "kept"])
@distributed(2)
def test_a_user_gets_memory_that_no_other_rank_sees(how: str) -> None:
    model = make(reshard_after_forward=how != "kept")
    with torch.no_grad():
        model(batch())  # where gathered parameters lie in shared memory
    if how == "block":
        with unsharded(model):
            assert not seen_by_rank_1(poke(model[2].weight))
    else:
        handle = model[2].unshard(async_op=how == "asynchronously")
        if handle is not None:
            handle.wait()
        assert not seen_by_rank_1(poke(model[2].weight))
        model[2].reshard()


@distributed(2)
def test_gradients_are_right_however_forwards_and_unshards_alternate() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4, bias=False))
    model = make()
    for step in range(4):
        if step == 1:
            model[2].unshard()  # private in this forward, and so in its backward
        loss = model(batch(step)).square().sum()
        if step == 2:
            model[0].unshard()  # in the middle of a step: where the graph has it
        if step == 3:
            with unsharded(model):
                loss.backward()
        else:
            loss.backward()
        model[0].reshard()
        model[2].reshard()
        plain(batch(step)).square().sum().backward()
        for mine, full in zip(model.parameters(), plain.parameters(), strict=True):
            assert full.grad is not None and mine.grad is not None
            dist.all_reduce(full.grad, dist.ReduceOp.SUM)
            torch.testing.assert_close(mine.grad.full_tensor(), full.grad / 2)
            full.grad = mine.grad = None


@contextmanager
def _short_of_memory(after: int) -> Iterator[None]:
    """A context in which only so many segments can be made."""
    made = SegmentFile.make
    count = 0

    def make_some(*args: Any, **kwargs: Any) -> SegmentFile:
        nonlocal count
        count += 1
        if count > after:
            raise OSError(12, "no memory")
        return made(*args, **kwargs)

    with patch.object(SegmentFile, "make", make_some):
        yield


@pytest.mark.parametrize("after", [0, 1, 2])
@distributed(2)
def test_groups_without_room_are_gathered_in_private_memory(after: int) -> None:
    wanted = make()
    wanted(batch()).sum().backward()
    model = make()
    with _short_of_memory(after):
        model(batch()).sum().backward()
    for mine, theirs in zip(model.parameters(), wanted.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert torch.equal(mine.grad.to_local(), theirs.grad.to_local())


@distributed(2)
def test_a_collective_replaced_between_forward_and_backward_fills_what_the_graph_holds() -> None:
    wanted, model = make(), make()
    for net in (wanted, model):
        loss = net(batch()).square().sum()
        if net is model:
            for layer in (model[0], model[2]):
                own = ProcessGroupTransport()
                layer.set_custom_all_gather(DefaultAllGather(transport=own))
        loss.backward()
        net(batch(1)).square().sum().backward()
    for mine, theirs in zip(model.parameters(), wanted.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert torch.equal(mine.grad.to_local(), theirs.grad.to_local())


def mappings() -> int:
    """Segments that this process maps."""
    text = Path("/proc/self/maps").read_text()
    return sum("memfd:fullshard" in line for line in text.splitlines())


@distributed(2)
def test_steps_map_no_more_memory_and_a_dead_model_gives_its_own_back() -> None:
    before = mappings()
    model = make()
    for step in range(2):
        model(batch(step)).sum().backward()
    steady = mappings()
    assert steady >= before + 2
    for step in range(3):
        model(batch(step)).sum().backward()
    assert mappings() == steady
    del model
    gc.collect()
    assert mappings() <= steady - 2


# -- collectives through it ------------------------------------------------------------------------


def through(transport: Any, model: Any) -> Any:
    """Every collective of ``model`` through a transport."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(DefaultAllGather(transport=transport))
            module.set_custom_reduce_scatter(DefaultReduceScatter(transport=transport))
    return model


TRANSPORTS = (SharedMemoryTransport(), ProcessGroupTransport())


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

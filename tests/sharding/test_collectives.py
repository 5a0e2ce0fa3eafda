"""How many collectives a step has, and that ranks cannot diverge in them (DESIGN 3.4)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fullshard.comm import EventKind, EventLog, observe
from support.events.models import DIM, batch, make_net
from support.events.recorder import (
    Recorder,
    Shard,
    assert_close_to,
    averaged_gradients,
    compare_with_torch,
    full_gradients,
    ours,
    record,
)
from support.modules import Assembled
from support.ranks import distributed

RESHARD = pytest.mark.parametrize("reshard", [True, False, None])
GATHERS = {True: 8, False: 4, None: 7}  # of a root and three blocks, per step


def step(net: nn.Module, **kwargs: Any) -> None:
    """One forward and backward."""
    net(batch(**kwargs)).square().sum().backward()


# -- how many -------------------------------------------------------------------------------------


@pytest.mark.cross
@RESHARD
@distributed(2, 4)
def test_a_step_has_as_many_collectives_as_torchs(reshard: bool | None) -> None:
    def scenario(shard: Shard) -> tuple[nn.Module, Recorder]:
        net = make_net(shard, reshard_after_forward=reshard)
        step(net)
        recorder = record(net)
        step(net)
        return net, recorder

    mine, theirs = compare_with_torch(scenario)
    assert len(mine.recorder.gathers) == GATHERS[reshard]
    assert len(mine.recorder.reductions) == 4
    assert sorted(mine.recorder.reductions) == sorted(theirs.recorder.reductions)


@pytest.mark.cross
@pytest.mark.parametrize("keep", [False, True], ids=["reshard-after-backward", "keep"])
@RESHARD
@distributed(2)
def test_accumulation_has_as_many_collectives_as_torchs(reshard: bool | None, keep: bool) -> None:
    def scenario(shard: Shard) -> tuple[nn.Module, Recorder]:
        net = make_net(shard, reshard_after_forward=reshard)
        recorder = record(net)
        for microbatch in range(3):
            last = microbatch == 2
            net.set_requires_gradient_sync(last)
            net.set_is_last_backward(last)
            net.set_reshard_after_backward(last or not keep)
            step(net, seed=microbatch)
            if not last:
                assert recorder.reductions == []
        return net, recorder

    mine, theirs = compare_with_torch(scenario)
    assert sorted(mine.recorder.reductions) == sorted(theirs.recorder.reductions)
    assert len(mine.recorder.reductions) == 4
    plain = make_net(None)
    for microbatch in range(3):
        step(plain, seed=microbatch)
    assert_close_to(mine.gradients, averaged_gradients(plain))
    if not keep:
        assert len(mine.recorder.gathers) == 3 * GATHERS[reshard]


@RESHARD
@distributed(2)
def test_accumulation_with_communication_reduces_every_time(reshard: bool | None) -> None:
    def scenario(shard: Shard) -> tuple[nn.Module, Recorder]:
        net = make_net(shard, reshard_after_forward=reshard)
        recorder = record(net)
        for microbatch in range(2):
            step(net, seed=microbatch)
        return net, recorder

    mine, theirs = compare_with_torch(scenario)
    assert len(mine.recorder.gathers) == 2 * GATHERS[reshard]
    assert len(mine.recorder.reductions) == len(theirs.recorder.reductions) == 8


@distributed(2)
def test_gradients_of_a_backward_that_is_not_the_last_appear_with_the_last() -> None:
    net = make_net(ours)
    log = EventLog()
    with observe(log):
        net.set_is_last_backward(False)
        step(net, seed=0)
        assert log.named(EventKind.REDUCE_DONE) == []
        net.set_is_last_backward(True)
        step(net, seed=1)
    assert len(log.named(EventKind.REDUCE_DONE)) == len(log.named(EventKind.REDUCE)) == 8
    plain = make_net(None)
    for seed in (0, 1):
        step(plain, seed=seed)
    assert_close_to(full_gradients(net), averaged_gradients(plain))


@distributed(2)
def test_keeping_after_backward_saves_the_gathers_of_the_next_forward() -> None:
    net = make_net(ours, reshard_after_forward=True)
    net.set_reshard_after_backward(False)
    recorder = record(net)
    step(net)
    recorder.clear()
    with torch.no_grad():
        net(batch())
    assert recorder.gathers == []


@distributed(2)
def test_frozen_groups_are_gathered_and_not_reduced() -> None:
    def scenario(shard: Shard) -> tuple[nn.Module, Recorder]:
        net = make_net(shard)
        net.blocks[1].requires_grad_(False)
        recorder = record(net)
        step(net)
        return net, recorder

    mine, theirs = compare_with_torch(scenario)
    assert sorted(mine.recorder.reductions) == sorted(theirs.recorder.reductions)
    assert "blocks.1" not in mine.recorder.reductions


# -- when -----------------------------------------------------------------------------------------


@distributed(2)
def test_a_group_reduces_at_the_post_backward_of_its_last_outstanding_use() -> None:
    net = make_net(ours, blocks=2)
    log = EventLog()
    losses = [net(batch(seed=seed, requires_grad=True)).square().sum() for seed in (1, 2)]
    with observe(log):
        (losses[0] + losses[1]).backward()
    kinds = [
        event.kind
        for event in log.of(EventKind.POST_BACKWARD, EventKind.REDUCE)
        if event.name == "blocks.1"
    ]
    assert kinds == [EventKind.POST_BACKWARD, EventKind.POST_BACKWARD, EventKind.REDUCE]
    assert log.named(EventKind.REDUCE) == ["blocks.1", "blocks.0", "(root)"]


@distributed(2)
def test_groups_reached_for_some_uses_only_reduce_at_the_end_in_reverse_first_forward_order() -> (
    None
):
    net = make_net(ours)
    log = EventLog()
    losses = [net(batch(seed=seed, requires_grad=True)).square().sum() for seed in (1, 2)]
    with observe(log):
        losses[1].backward()
    assert log.named(EventKind.REDUCE) == ["blocks.2", "blocks.1", "blocks.0", "(root)"]
    kinds = [event.kind for event in log.of(EventKind.POST_BACKWARD, EventKind.REDUCE)]
    assert kinds == [EventKind.POST_BACKWARD] * 4 + [EventKind.REDUCE] * 4
    log.clear()
    with observe(log):
        losses[0].backward()
    kinds = [event.kind for event in log.of(EventKind.POST_BACKWARD, EventKind.REDUCE)]
    assert kinds == [EventKind.POST_BACKWARD, EventKind.REDUCE] * 4, "nothing is outstanding now"
    plain = make_net(None)
    for seed in (1, 2):
        step(plain, seed=seed)
    assert_close_to(full_gradients(net), averaged_gradients(plain))


def _fork() -> Any:
    """Two branches, sharded each by itself, and a stem that belongs to the root."""

    def both(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tanh(m.stem(x))
        return m.left(x), m.right(x)

    return Assembled(both, **{name: nn.Linear(DIM, DIM) for name in ("stem", "left", "right")})


def make_fork(shard: Shard | None, **arguments: Any) -> Any:
    """A ``Fork``, sharded."""
    torch.manual_seed(0)
    fork = _fork()
    if shard is not None:
        for module in (fork.left, fork.right, fork):
            shard(module, **arguments)
    return fork


@RESHARD
@distributed(2)
def test_a_group_that_backward_does_not_reach_is_not_reduced(reshard: bool | None) -> None:
    def scenario(shard: Shard) -> tuple[nn.Module, Recorder]:
        fork = make_fork(shard, reshard_after_forward=reshard)
        recorder = record(fork)
        left, _ = fork(batch())
        left.sum().backward()
        del left, _
        return fork, recorder

    mine, theirs = compare_with_torch(scenario)
    assert sorted(mine.recorder.reductions) == sorted(theirs.recorder.reductions)
    assert mine.recorder.reductions == ["left", "root"]
    assert mine.gradients["right.weight"] is None


@distributed(2)
def test_a_graph_that_backward_left_in_part_can_be_finished_later() -> None:
    fork, plain = make_fork(ours), make_fork(None)
    recorder = record(fork)
    for model in (fork, plain):
        left, right = model(batch(requires_grad=True))
        left.sum().backward(retain_graph=True)
        right.square().sum().backward()
    assert recorder.reductions == ["left", "root", "right", "root"]
    assert_close_to(full_gradients(fork), averaged_gradients(plain))

"""Whole event orders of activation checkpointing, both variants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard.comm import EventKind, EventLog, observe
from support.events.models import leaf_batch as batch
from support.events.models import make_net
from support.events.recorder import (
    Outcome,
    Recorder,
    Shard,
    assert_close_to,
    averaged_gradients,
    compare_with_torch,
    lifecycle,
    ours,
    record,
)
from support.ranks import distributed

REENTRANT = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
RESHARD = pytest.mark.parametrize("reshard", [True, False, None])
Run = Callable[[nn.Module, bool], None]


def one_step(net: nn.Module, reentrant: bool) -> None:
    """Forward and backward, each block as it was built."""
    net(batch()).square().sum().backward()


def whole_model(net: nn.Module, reentrant: bool) -> None:
    """The whole model in one checkpoint."""
    checkpoint(net, batch(), use_reentrant=reentrant).square().sum().backward()


def two_forwards(net: nn.Module, reentrant: bool) -> None:
    """Two forwards, then the backward of both."""
    (net(batch(seed=1)).square().sum() + net(batch(seed=2)).sum()).backward()


def against_torch_and_plain(
    run: Run, reentrant: bool, *, torch_is_right: bool = True, **arguments: Any
) -> tuple[Outcome, Outcome]:
    """The outcomes of ``run``, once their gathers and gradients were compared.

    Over two steps, so that a lease that was left behind would show; over one where torch's state
    would not be fit for a second.
    """
    steps = 2 if torch_is_right else 1

    def scenario(shard: Shard) -> tuple[nn.Module, Recorder]:
        net = make_net(shard, **arguments)
        recorder = record(net)
        for _ in range(steps):
            run(net, reentrant)
        return net, recorder

    outcomes = compare_with_torch(scenario, gradients=torch_is_right)
    plain = make_net(None, blocks=arguments.get("blocks", 3))
    for _ in range(steps):
        (one_step if run is whole_model else run)(plain, reentrant)
    assert_close_to(outcomes[0].gradients, averaged_gradients(plain))
    return outcomes


# -- event orders ---------------------------------------------------------------------------------


@distributed(2)
def test_the_events_of_a_non_reentrant_checkpoint_of_a_block() -> None:
    net = make_net(ours, outer=False, blocks=1)
    loss = net(batch()).sum()
    log = EventLog()
    with observe(log):
        loss.backward()
    assert lifecycle(log) == [
        "pre_backward root",
        "prefetch 0",
        "unshard 0",
        "pre_backward 0",
        "wait 0",
        "pre_forward 0",
        "post_forward 0",
        "post_backward 0",
        "reshard 0",
        "reduce 0",
        "post_backward root",
        "reshard root",
        "reduce root",
        "reduce_done 0",
        "reduce_done root",
    ]


@distributed(2)
def test_the_events_of_a_reentrant_checkpoint_of_a_block() -> None:
    net = make_net(ours, outer=True, blocks=1)
    log = EventLog()
    with observe(log):
        net(batch()).sum().backward()
    assert lifecycle(log) == [
        "pre_forward root",
        "unshard root",
        "wait root",
        "pre_forward 0",
        "unshard 0",
        "wait 0",
        "post_forward 0",
        "reshard 0",
        "post_forward root",
        "pre_backward root",
        "prefetch 0",
        "unshard 0",
        "pre_forward 0",
        "wait 0",
        "post_forward 0",
        "pre_backward 0",
        "post_backward 0",
        "reshard 0",
        "reduce 0",
        "post_backward root",
        "reshard root",
        "reduce root",
        "reduce_done 0",
        "reduce_done root",
    ]


@distributed(2)
def test_the_events_of_nested_modules_in_a_non_reentrant_checkpoint() -> None:
    net = make_net(ours, outer=False, nested=True, blocks=1)
    loss = net(batch()).sum()
    log = EventLog()
    with observe(log):
        loss.backward()
    assert lifecycle(log) == [
        "pre_backward root",
        "prefetch 0.down",
        "unshard 0.down",
        "pre_backward 0",
        "pre_backward 0.down",
        "wait 0.down",
        "prefetch 0.up",
        "unshard 0.up",
        "pre_forward 0",
        "pre_forward 0.up",
        "wait 0.up",
        "post_forward 0.up",
        "pre_forward 0.down",
        "post_forward 0.down",
        "post_forward 0",
        "post_backward 0.down",
        "reshard 0.down",
        "reduce 0.down",
        "pre_backward 0.up",
        "post_backward 0.up",
        "reshard 0.up",
        "reduce 0.up",
        "post_backward root",
        "reshard root",
        "reduce root",
        "reduce_done 0.down",
        "reduce_done 0.up",
        "reduce_done root",
    ]


@distributed(2)
def test_the_events_of_two_forwards_before_a_backward() -> None:
    net = make_net(ours, blocks=1)
    log = EventLog()
    losses = [net(batch(seed=seed)).sum() for seed in (1, 2)]
    with observe(log):
        (losses[0] + losses[1]).backward()
    assert [line for line in lifecycle(log) if line.endswith(" 0")] == [
        "prefetch 0",
        "unshard 0",
        "pre_backward 0",
        "wait 0",
        "post_backward 0",
        "reshard 0",
        "prefetch 0",
        "unshard 0",
        "pre_backward 0",
        "wait 0",
        "post_backward 0",
        "reshard 0",
        "reduce 0",
        "reduce_done 0",
    ]
    assert log.named(EventKind.REDUCE) == ["blocks.0", "(root)"]

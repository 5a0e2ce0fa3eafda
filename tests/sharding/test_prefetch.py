"""Prefetch: lists and policies, who claims a gather, and that nobody waits for it too early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.comm import EventKind, EventLog, observe
from fullshard.policies import DepthPrefetch, NoPrefetch
from fullshard.sharding.base.states import ShardedState
from support.events.models import batch, make_net, step
from support.events.recorder import (
    Recorder,
    Shard,
    against_torch,
    assert_all_returned,
    group_of,
    ours,
    record,
)
from support.modules import Assembled
from support.ranks import distributed


def brief(recorder: Recorder) -> str:
    """Gathers and waits, as ``"g0 w0"``; the root is ``r``."""
    return " ".join(
        call[0] + call.split()[1].replace("blocks.", "").replace("root", "r")
        for call in recorder.calls
        if not call.startswith("reduce")
    )


def mark(recorder: Recorder, call: str, *_: object) -> None:
    """A hook that notes when it ran."""
    recorder.calls.append(call)


# -- policies -------------------------------------------------------------------------------------


def set_depth(net: Any, depth: int) -> None:
    """What ``DepthPrefetch`` says, as the lists that torch has for it."""
    order = [net, *net.blocks]
    for index, module in enumerate(order):
        module.set_modules_to_forward_prefetch(order[index + 1 : index + 1 + depth])
    after = [*net.blocks, net]  # the order in which forwards end
    for index, module in enumerate(after):
        ahead = after[max(index - depth, 0) : index][::-1]
        if ahead:
            module.set_modules_to_backward_prefetch(ahead)


@pytest.mark.parametrize("depth", [1, 2, 3])
@distributed(2)
def test_a_depth_policy_gathers_as_torchs_lists_of_that_depth(depth: int) -> None:
    def make(shard: Shard) -> nn.Module:
        policy = DepthPrefetch(forward=depth, backward=depth)
        own: dict[str, Any] = {"prefetch_policy": policy} if shard is ours else {}
        net: nn.Module = make_net(shard, **own)
        step(net)  # the policy learns the order of forward
        if shard is not ours:
            set_depth(net, depth)
        return net

    against_torch(lambda net, _: step(net), make=make)


@distributed(2)
def test_a_policy_sees_names_in_the_order_of_the_forward_with_multiplicity() -> None:
    asked: list[tuple[str, tuple[str, ...], int]] = []

    @dataclass(frozen=True)
    class Notes:
        def in_forward(self, order: Sequence[str], position: int) -> Sequence[int]:
            asked.append(("forward", tuple(order), position))
            return ()

        def in_backward(self, order: Sequence[str], position: int) -> Sequence[int]:
            asked.append(("backward", tuple(order), position))
            return ()

    net = make_net(ours, prefetch_policy=Notes(), blocks=2)
    step(net)
    after = ("blocks.0", "blocks.1", "")
    assert asked == [("backward", after, position) for position in (2, 1, 0)]
    asked.clear()
    net(batch())
    before = ("", "blocks.0", "blocks.1")
    assert asked == [("forward", before, position) for position in (0, 1, 2)]
    net.parameters_changed()  # the forward that was dropped leaves the order with its parameters
    asked.clear()
    loss = net(batch()).sum() + net(batch()).sum()
    asked.clear()
    loss.backward()
    assert asked == [("backward", after * 2, position) for position in (5, 4, 3, 2, 1, 0)]


@distributed(2)
def test_a_position_that_does_not_exist_is_an_error_that_names_who_asked() -> None:
    @dataclass(frozen=True)
    class TooFar:
        def in_forward(self, order: Sequence[str], position: int) -> Sequence[int]:
            return ()

        def in_backward(self, order: Sequence[str], position: int) -> Sequence[int]:
            return (len(order),)

    net = make_net(ours, prefetch_policy=TooFar(), blocks=2)
    with pytest.raises(IndexError, match=r"prefetch policy .*''.* position 3; .*0 to 2"):
        step(net)
    net.reset_iter_state()


@distributed(2)
def test_a_forward_in_another_order_than_the_last_prefetches_nothing_wrong() -> None:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        for index in m.order:
            x = m.inside.blocks[index](x)
        return m.inside.head(x)

    model: Any = Assembled(run, inside=make_net(None), order=(0, 1, 2))
    for block in model.inside.blocks:
        ours(block, prefetch_policy=DepthPrefetch())
    ours(model, prefetch_policy=DepthPrefetch())
    for order in [(0, 1, 2), (2, 1, 0), (1,), (0, 1, 2)]:
        model.order = order
        model(batch()).sum().backward()
        assert_all_returned(model)


# -- who claims it --------------------------------------------------------------------------------


@distributed(2)
def test_what_forward_gathered_ahead_and_nobody_used_returns_at_the_end_of_the_roots_forward() -> (
    None
):
    net = make_net(ours)
    net.blocks[2].set_modules_to_forward_prefetch([net.blocks[0]])
    states = []
    net.head.register_forward_hook(lambda *_: states.append(group_of(net.blocks[0]).state))
    recorder = record(net)
    output = net(batch())
    assert states == [ShardedState.UNSHARDING]
    assert group_of(net.blocks[0]).state is ShardedState.SHARDED
    assert brief(recorder).endswith("g2 w2 g0 w0"), "it is waited for, so that nothing is in flight"
    output.sum().backward()
    assert_all_returned(net)


@distributed(2)
def test_what_backward_gathered_ahead_and_nobody_used_returns_at_the_end_of_backward() -> None:
    net = make_net(ours)
    net.blocks[0].set_modules_to_backward_prefetch([net.blocks[2]])
    recorder = record(net)
    log = EventLog()
    loss = net(batch()).sum()
    recorder.clear()
    with observe(log):
        loss.backward()
    assert brief(recorder) == "g2 w2 g1 w1 g0 w0 g2 w2"
    assert log.named(EventKind.PREFETCH) == ["blocks.2", "blocks.1", "blocks.0", "blocks.2"]
    assert_all_returned(net)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("sync", [True, False])
@distributed(2)
def test_what_was_gathered_ahead_serves_the_next_micro_batch_unless_this_was_the_last(
    sync: bool, last: bool
) -> None:
    """The list is of torch's API, and the answer torch's: an unused gather waits for its use."""

    def run(net: Any, recorder: Recorder) -> None:
        net.blocks[0].set_modules_to_backward_prefetch([net.blocks[2]])
        net.set_is_last_backward(last)
        net.set_requires_gradient_sync(sync)
        step(net)
        recorder.clear()
        net.set_is_last_backward(True)
        net.set_requires_gradient_sync(True)
        net.blocks[0].set_modules_to_backward_prefetch([])
        step(net)

    mine, _ = against_torch(run)
    assert mine.recorder.gathers.count("blocks.2") == (2 if last else 1)


@distributed(2)
def test_prefetching_what_is_unsharded_already_does_nothing() -> None:
    net = make_net(ours, reshard_after_forward=False)
    net.blocks[2].set_modules_to_forward_prefetch([net.blocks[0], net.blocks[2], net])
    log = EventLog()
    with observe(log):
        step(net)
    assert log.named(EventKind.PREFETCH) == []
    assert log.named(EventKind.UNSHARD) == ["(root)", "blocks.0", "blocks.1", "blocks.2"]


# -- asynchronous on CPU --------------------------------------------------------------------------


@distributed(2, 4)
def test_a_prefetched_gather_is_not_waited_for_before_its_use() -> None:
    net = make_net(ours)
    net.set_modules_to_forward_prefetch([net.blocks[0], net.blocks[1]])
    net.blocks[0].set_modules_to_forward_prefetch([net.blocks[2]])
    recorder = record(net)
    marks = [partial(mark, recorder, f"compute {index}") for index in range(3)]
    for block, each in zip(net.blocks, marks, strict=True):
        block.up.register_forward_hook(each)
    loss = net(batch()).sum()
    assert brief(recorder) == "gr wr g0 g1 w0 g2 c0 w1 c1 w2 c2"
    recorder.clear()
    for block, each in zip(net.blocks, marks, strict=True):
        # fires when all of the block's backward but its first linear is over
        group_of(block).params[0].unsharded.register_post_accumulate_grad_hook(each)
    loss.backward()
    assert brief(recorder) == "g2 w2 g1 c2 w1 g0 c1 w0 c0"


# -- ranks that run different modules -------------------------------------------------------------


class _Tail(nn.Module):
    """A layer of its own group, then one that some ranks skip."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.tail = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, skips: bool) -> torch.Tensor:
        x = self.inner(torch.tanh(x))
        return x if skips else self.tail(torch.tanh(x))


class _Tails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = _Tail(), _Tail(), nn.Linear(4, 1)
        self.double()

    def forward(self, rank: int) -> torch.Tensor:
        x = torch.linspace(rank, 1, 12, dtype=torch.float64).view(3, 4)
        skips = rank == 1
        out: torch.Tensor = self.head(self.second(self.first(x, skips), skips))
        return out.square().mean()


@distributed(2)
def test_modules_with_one_output_begin_backward_from_the_outermost_inwards() -> None:
    """A rank that skips the last layer of a module gathers in the order of the others.

    torch gathers the inner one first there, and the ranks' collectives do not match.
    """
    net, plain = _Tails(), _Tails()
    for module in (net.first.inner, net.first, net.second.inner, net.second, net):
        ours(module, prefetch_policy=NoPrefetch())
    net(dist.get_rank()).backward()
    torch.stack([plain(rank) for rank in range(2)]).mean().backward()
    for (name, mine), theirs in zip(net.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, msg=name)  # type: ignore[union-attr]  # a DTensor

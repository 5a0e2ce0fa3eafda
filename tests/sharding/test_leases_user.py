"""DESIGN's leases of graphs, of users, and of forwards without gradients."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.comm import DefaultAllGather, ProcessGroupTransport
from fullshard.sharding import fully_shard
from fullshard.sharding import unsharded as fullshard_unsharded
from fullshard.sharding.base.states import ShardedState
from fullshard.sharding.hooks.lookup import the_state
from support.events.models import batch, make_net
from support.events.recorder import (
    Recorder,
    Shard,
    against_torch,
    assert_all_returned,
    assert_close_to,
    full_gradients,
    gathered,
    group_of,
    ours,
    record,
    shard_with_torch,
    unsharded,
)
from support.failing import failing
from support.modules import Assembled
from support.ranks import distributed


def plain(net: Any) -> list[str]:
    """Which modules of a ``Net`` hold plain parameters now."""
    places = {"root": net.head, **{str(i): block.up for i, block in enumerate(net.blocks)}}
    return [name for name, each in places.items() if not isinstance(each.weight, DTensor)]


# -- graphs ---------------------------------------------------------------------------------------


@distributed(2)
def test_a_module_that_runs_twice_in_a_forward_is_gathered_for_each() -> None:
    def twice(m: Any, x: torch.Tensor) -> torch.Tensor:
        for block in (0, 1, 0):
            x = m.inside.blocks[block](x)
        return m.inside.head(x)

    def make(shard: Shard) -> nn.Module:
        model = Assembled(twice, inside=make_net(None, blocks=2))
        for module in (*model.inside.blocks, model):
            shard(module)
        return model

    mine, _ = against_torch(lambda model, _: model(batch()).sum().backward(), make=make)
    first, second = "inside.blocks.0", "inside.blocks.1"
    assert mine.recorder.gathers == ["root", first, second, first, first, second, first]


@pytest.mark.parametrize("reshard", [True, False, None])
@distributed(2)
def test_a_graph_holds_its_groups_through_the_backward_of_another(reshard: bool | None) -> None:
    def scenario(shard: Shard) -> tuple[nn.Module, Recorder]:
        net = make_net(shard, reshard_after_forward=reshard)
        recorder = record(net)
        losses = [net(batch(seed=seed)).square().sum() for seed in (1, 2)]
        recorder.clear()
        for loss in losses:
            loss.backward()
        return net, recorder

    theirs, recorder_of_torch = scenario(shard_with_torch)
    mine, recorder = scenario(ours)
    assert_close_to(full_gradients(mine), full_gradients(theirs))
    assert_all_returned(mine)
    assert recorder.reductions == gathered("2 1 0 root 2 1 0 root")
    wanted = {True: "root 2 1 0 root 2 1 0", None: "2 1 0 2 1 0", False: ""}[reshard]
    assert recorder.gathers == gathered(wanted)
    # Torch reshards a group at the backward of any forward, so for the second it gathers again what
    # ours still holds for it.
    saved = {True: 0, None: 1, False: 4}[reshard]
    assert len(recorder_of_torch.gathers) == len(recorder.gathers) + saved


# -- user -----------------------------------------------------------------------------------------


@pytest.mark.cross
@pytest.mark.parametrize("reshard", [None, True, False, 2])
@pytest.mark.parametrize("how", ["unshard", "unshard async", "unshard async, waited for"])
@distributed(2)
def test_a_step_ends_what_was_gathered_by_hand_as_torchs_does(
    how: str, reshard: bool | int | None
) -> None:
    holds: list[list[list[str]]] = []  # of torch's, of ours

    def unshard(*modules: Any) -> None:
        handles = [module.unshard(async_op=how != "unshard") for module in modules]
        for handle in handles if how.endswith("waited for") else ():
            handle.wait()

    def run(net: Any, recorder: Recorder) -> None:
        holds.append(seen := [])
        unshard(*net.blocks)
        loss = net(batch()).sum()  # finds the root
        seen.append(plain(net))
        loss.backward()
        unshard(net, *net.blocks)
        with torch.no_grad():
            net(batch())
        seen.append(plain(net))
        if reshard is not False:
            unshard(net.blocks[0])
            unshard(net.blocks[0])
        net.set_requires_gradient_sync(False)
        loss = net(batch()).sum()
        if reshard is not False:
            unshard(*net.blocks)  # ahead of backward
        loss.backward()
        net.set_requires_gradient_sync(True)
        seen.append(plain(net))
        loss = net(batch()).sum()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        assert isinstance(norm, DTensor)
        assert norm.full_tensor() > 1
        seen.append(plain(net))

    against_torch(run, reshard_after_forward=reshard)
    assert holds[0] == holds[1]
    assert holds[0][-1] == []


@pytest.mark.parametrize("outer", [None, False, True])
@distributed(2)
def test_a_step_that_gathers_by_hand_in_its_hooks_ends_it_as_torchs_does(
    outer: bool | None,
) -> None:
    def run(net: Any, recorder: Recorder) -> None:
        first, second, _ = net.blocks
        first.register_forward_pre_hook(lambda *_: second.unshard(async_op=True) and None)
        second.up.register_forward_hook(lambda *_: second.unshard())  # in use: nothing happens
        for _ in range(2):
            net(batch(requires_grad=True)).sum().backward()
            assert plain(net) == []

    against_torch(run, outer=outer)


@distributed(2)
def test_a_backward_ends_what_was_gathered_by_hand_and_not_used() -> None:
    def make(shard: Shard) -> nn.Module:
        net: Any = make_net(shard)
        net.blocks.append(make_net(shard, blocks=1).blocks[0])
        return net

    def run(net: Any, recorder: Recorder) -> None:
        unused, outputs = net.blocks[1], []
        net.run = lambda block, x: x if block is unused else block(x)
        net.blocks[0].register_forward_hook(lambda *args: outputs.append(args[-1]))
        for _ in range(2):
            for block in net.blocks:
                block.unshard()
            net(batch())
            net.blocks[2].unshard()
            outputs[-1].sum().backward()
            assert plain(net) == []

    against_torch(run, make=make)


@distributed(2)
def test_a_block_of_unsharded_holds_a_group_through_whole_steps() -> None:
    net = make_net(ours)
    recorder = record(net)
    with fullshard_unsharded(net):
        net.blocks[0].unshard()
        net(batch()).sum().backward()
        assert unsharded(net) == ["root", "0", "1", "2"]
        net(batch()).sum().backward()
    assert recorder.gathers == gathered("root 0 1 2")
    assert_all_returned(net)


@distributed(2)
def test_reshard_also_drops_what_a_graph_and_a_prefetch_hold() -> None:
    net = make_net(ours, reshard_after_forward=False)
    recorder = record(net)
    net.blocks[0].set_modules_to_forward_prefetch([net.blocks[1]])
    seen = []

    def reshard_second(*_: object) -> None:
        seen.append(group_of(net.blocks[1]).state)
        net.blocks[1].reshard()
        seen.append(group_of(net.blocks[1]).state)

    net.blocks[0].down.register_forward_hook(reshard_second)
    output = net(batch())
    assert seen == [ShardedState.UNSHARDING, ShardedState.SHARDED]
    assert recorder.gathers == gathered("root 0 1 1 2")
    net.blocks[1].reshard()
    assert unsharded(net) == ["root", "0", "2"]
    recorder.clear()
    output.sum().backward()
    assert recorder.gathers == gathered("1"), "backward gathers again what was dropped"
    assert_all_returned(net)


@distributed(2)
def test_reshard_in_the_middle_of_a_forward_waits_for_its_end() -> None:
    net = make_net(ours)
    states = []

    def reshard(*_: object) -> None:
        net.blocks[1].reshard()
        states.append(group_of(net.blocks[1]).state)

    net.blocks[1].up.register_forward_hook(reshard)
    net(batch()).sum().backward()
    assert states == [ShardedState.UNSHARDED]
    assert_all_returned(net)


@pytest.mark.parametrize("waits", ["never", "before forward", "after forward"])
@distributed(2)
def test_an_asynchronous_unshard_is_the_forwards_own_gather(waits: str) -> None:
    def run(net: Any, recorder: Recorder) -> None:
        net(batch())
        net.reshard()  # torch keeps what only the root holds
        recorder.clear()
        handle = net.blocks[1].unshard(async_op=True)
        assert recorder.calls == ["gather blocks.1"], "nobody waited for it"
        if waits == "before forward":
            handle.wait()
        output = net(batch())
        if waits == "after forward":
            handle.wait()
            handle.wait()
        net.blocks[1].reshard()
        output.sum().backward()

    mine, _ = against_torch(run)
    assert mine.recorder.gathers == gathered("1 root 0 2 2 1 0")


@distributed(2)
def test_an_asynchronous_unshard_that_nobody_waits_for_can_be_resharded() -> None:
    net = make_net(ours)
    for _ in range(2):
        handle = net.blocks[1].unshard(async_op=True)
        net.blocks[1].reshard()
        handle.wait()
        assert_all_returned(net)


# -- gradients off --------------------------------------------------------------------------------


@pytest.mark.parametrize("reshard", [True, False, None])
@distributed(2)
def test_zero_grad_after_an_evaluation_clears_the_gradients_of_what_stayed_unsharded(
    reshard: bool | None,
) -> None:
    net = make_net(ours, reshard_after_forward=reshard)
    net(batch()).sum().backward()
    wanted = full_gradients(net)
    with torch.no_grad():
        net(batch())
    net.zero_grad()
    net(batch()).sum().backward()
    assert_close_to(full_gradients(net), wanted)


@distributed(2)
def test_only_a_forward_that_ran_stays_unsharded() -> None:
    net = make_net(ours, reshard_after_forward=False)
    net(batch()).sum().backward()
    with failing(net.blocks[1].down):
        net(batch())
    assert group_of(net.blocks[1]).state is ShardedState.SHARDED
    assert group_of(net).state is ShardedState.SHARDED


class _Noting(DefaultAllGather):
    """Notes whether each gather was to be asynchronous."""

    def __init__(self) -> None:
        super().__init__(transport=ProcessGroupTransport())
        self.asked: list[bool] = []

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        self.asked.append(async_op)
        return super().__call__(output_tensor, input_tensor, group, async_op)


@pytest.mark.parametrize("async_op", [False, True])
@distributed(2)
def test_a_gather_by_hand_is_asynchronous_if_the_user_asks_for_it(async_op: bool) -> None:
    model: Any = fully_shard(nn.Linear(4, 4))
    noting = _Noting()
    model.set_custom_all_gather(noting)
    state = the_state(model)
    state.ensure_initialised()
    streams = state.own_groups[0].gathering.config.streams
    with mock.patch.object(streams, "asynchronous_work", False):  # as a device with streams has it
        handle = model.unshard(async_op=async_op)
    assert noting.asked == [async_op]
    assert isinstance(model.weight, DTensor) == async_op  # until the handle is waited for
    if handle is not None:
        handle.wait()
    assert not isinstance(model.weight, DTensor)

"""DESIGN's leases of a plain step: forward, graph and backward; a test per sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fullshard.sharding.base.states import LeaseKind
from support.events.models import batch, make_net
from support.events.recorder import (
    Recorder,
    Shard,
    against_torch,
    assert_all_returned,
    assert_close_to,
    by_name,
    events_of,
    full_gradients,
    gathered,
    group_of,
    ours,
    record,
    shard_with_torch,
    unsharded,
)
from support.modules import Assembled
from support.ranks import distributed

# -- forward --------------------------------------------------------------------------------------


@distributed(2, 4)
def test_forward_holds_a_group_from_pre_forward_to_post_forward() -> None:
    net = make_net(ours)
    inside: list[list[str]] = []
    for block in net.blocks:
        block.down.register_forward_hook(lambda *_: inside.append(unsharded(net)))
    net(batch())
    assert inside == [["root", "0"], ["root", "1"], ["root", "2"]]


@distributed(2)
def test_a_forward_that_raises_still_returns_its_lease() -> None:
    net = make_net(ours, reshard_after_forward=True)

    def fail(*_: object) -> None:
        assert unsharded(net) == ["root", "1"]
        raise ArithmeticError("the user's own")

    handle = net.blocks[1].down.register_forward_hook(fail)
    with pytest.raises(ArithmeticError, match="the user's own"):
        net(batch())
    handle.remove()
    assert_all_returned(net)


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


# -- graph ----------------------------------------------------------------------------------------


@distributed(2, 4)
def test_a_graph_holds_its_groups_if_they_are_not_resharded_after_forward() -> None:
    net = make_net(ours, reshard_after_forward=False)
    output = net(batch())
    assert unsharded(net) == ["root", "0", "1", "2"]
    assert {group_of(block).leases.count(LeaseKind.GRAPH) for block in net.blocks} == {1}
    output.sum().backward()
    assert_all_returned(net)


@distributed(2)
def test_of_two_graphs_each_holds_the_groups_for_itself() -> None:
    net = make_net(ours, reshard_after_forward=False)
    first, second = net(batch(seed=1)), net(batch(seed=2))
    del first
    assert unsharded(net) == ["root", "0", "1", "2"]
    second.sum().backward()
    assert_all_returned(net)


@distributed(2)
def test_a_group_that_only_an_earlier_graph_holds_is_gathered_anew_by_the_next_forward() -> None:
    # that graph may have died on another rank, which then gathers: so all ranks do
    net = make_net(ours)
    recorder = record(net)
    (net(batch(seed=1)).sum() + net(batch(seed=2)).square().sum()).backward()
    assert recorder.gathers == gathered("root 0 1 2 root 0 1 2 2 1 0 2 1")
    assert_all_returned(net)


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


# -- backward -------------------------------------------------------------------------------------


@distributed(2)
def test_backward_holds_a_group_from_pre_backward_to_post_backward() -> None:
    net = make_net(ours)
    inside: dict[int, list[str]] = {}
    for index, block in enumerate(net.blocks):
        block.down.register_full_backward_hook(
            lambda *_, index=index: inside.__setitem__(index, unsharded(net))
        )
    net(batch(requires_grad=True)).sum().backward()
    assert inside == {2: ["root", "2"], 1: ["root", "1"], 0: ["root", "0"]}
    assert_all_returned(net)


@distributed(2)
def test_what_no_post_backward_returns_the_end_of_backward_returns() -> None:
    net, moments = make_net(ours), []
    loss = net(batch()).sum()  # no input needs a gradient: no post-backward for root and block 0
    queue = torch.autograd.Variable._execution_engine.queue_callback

    def look(*_: object) -> None:  # queued before the engine's own, so it runs before it
        queue(lambda: moments.append(unsharded(net)))

    loss.register_hook(look)
    events = events_of(loss.backward)
    assert moments == [["root", "0"]]
    assert events[-11:-4] == by_name(
        """
        0: wait post_backward reshard reduce
        root: post_backward reshard reduce
        """
    )
    assert_all_returned(net)

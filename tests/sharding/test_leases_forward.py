"""DESIGN's leases of a plain step: forward, graph, backward, user, and gradients off.

One test per sentence. Each also compares with torch's own ``fully_shard`` in which order groups are
gathered.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fullshard.comm import EventLog, observe
from fullshard.sharding.base.states import LeaseKind
from support.events.models import batch, make_net
from support.events.recorder import (
    STEP,
    Recorder,
    Shard,
    assert_all_returned,
    assert_close_to,
    compare_with_torch,
    full_gradients,
    gathered,
    group_of,
    lifecycle,
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
    def scenario(shard: Shard) -> tuple[nn.Module, Recorder]:
        net = make_net(shard)
        recorder = record(net)
        net(batch()).sum().backward()
        return net, recorder

    mine, _ = compare_with_torch(scenario)
    assert mine.recorder.gathers == gathered(STEP)

    net = make_net(ours)
    inside: list[list[str]] = []
    for block in net.blocks:
        block.down.register_forward_hook(lambda *_: inside.append(unsharded(net)))
    log = EventLog()
    with observe(log):
        net(batch())
    assert inside == [["root", "0"], ["root", "1"], ["root", "2"]]
    for block in "012":
        events = [line for line in lifecycle(log) if line.endswith(f" {block}")]
        assert events == [
            f"{kind} {block}"
            for kind in ("pre_forward", "unshard", "wait", "post_forward", "reshard")
        ]


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

    def scenario(shard: Shard) -> tuple[nn.Module, Recorder]:
        model = Assembled(twice, inside=make_net(None, blocks=2))
        for block in model.inside.blocks:
            shard(block)
        shard(model)
        recorder = record(model)
        model(batch()).sum().backward()
        return model, recorder

    mine, _ = compare_with_torch(scenario)
    first, second = "inside.blocks.0", "inside.blocks.1"
    assert mine.recorder.gathers == ["root", first, second, first, first, second, first]


# -- graph ----------------------------------------------------------------------------------------


@distributed(2, 4)
def test_a_graph_holds_its_groups_if_they_are_not_resharded_after_forward() -> None:
    def scenario(shard: Shard) -> tuple[nn.Module, Recorder]:
        net = make_net(shard, reshard_after_forward=False)
        recorder = record(net)
        net(batch()).sum().backward()
        return net, recorder

    mine, _ = compare_with_torch(scenario)
    assert mine.recorder.gathers == gathered("root 0 1 2")

    net = make_net(ours, reshard_after_forward=False)
    output = net(batch())
    assert unsharded(net) == ["root", "0", "1", "2"]
    assert {group_of(block).leases.count(LeaseKind.GRAPH) for block in net.blocks} == {1}
    output.sum().backward()
    assert_all_returned(net)


@distributed(2)
def test_an_output_that_is_dropped_without_backward_returns_the_graphs_lease() -> None:
    net = make_net(ours, reshard_after_forward=False)
    output = net(batch())
    assert unsharded(net) == ["root", "0", "1", "2"]
    log = EventLog()
    with observe(log):
        del output
    assert sorted(lifecycle(log)) == ["reshard 0", "reshard 1", "reshard 2", "reshard root"]
    assert_all_returned(net)


@distributed(2)
def test_after_a_dropped_output_a_step_goes_as_if_it_had_never_been() -> None:
    def scenario(shard: Shard) -> tuple[nn.Module, Recorder]:
        net = make_net(shard)
        output = net(batch(seed=9))
        del output
        if shard is not ours:
            net.reshard()  # torch keeps what only the root holds
        recorder = record(net)
        net(batch()).sum().backward()
        return net, recorder

    mine, _ = compare_with_torch(scenario)
    assert mine.recorder.gathers == gathered(STEP)
    assert mine.recorder.reductions == gathered("2 1 0 root")


@distributed(2)
def test_of_two_graphs_each_holds_the_groups_for_itself() -> None:
    net = make_net(ours, reshard_after_forward=False)
    first, second = net(batch(seed=1)), net(batch(seed=2))
    del first
    assert unsharded(net) == ["root", "0", "1", "2"]
    second.sum().backward()
    assert_all_returned(net)


@distributed(2)
def test_two_forwards_before_a_backward_gather_as_torch_does() -> None:
    def scenario(shard: Shard) -> tuple[nn.Module, Recorder]:
        net = make_net(shard, reshard_after_forward=True)
        recorder = record(net)
        (net(batch(seed=1)).sum() + net(batch(seed=2)).square().sum()).backward()
        return net, recorder

    mine, theirs = compare_with_torch(scenario)
    assert mine.recorder.gathers[:8] == gathered("root 0 1 2 root 0 1 2")
    assert mine.recorder.reductions == gathered("2 1 0 root")
    assert sorted(theirs.recorder.reductions) == sorted(mine.recorder.reductions)


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
    log = EventLog()
    inside: dict[int, list[str]] = {}
    for index, block in enumerate(net.blocks):
        block.down.register_full_backward_hook(
            lambda *_, index=index: inside.__setitem__(index, unsharded(net))
        )
    loss = net(batch(requires_grad=True)).sum()
    with observe(log):
        loss.backward()
    assert inside == {2: ["root", "2"], 1: ["root", "1"], 0: ["root", "0"]}
    for block in "12":
        events = [line for line in lifecycle(log) if line.endswith(f" {block}")]
        assert events[-3:] == [f"{kind} {block}" for kind in ("reshard", "reduce", "reduce_done")]
        assert events.index(f"pre_backward {block}") < events.index(f"post_backward {block}")
    assert_all_returned(net)


@distributed(2)
def test_what_no_post_backward_returns_the_end_of_backward_returns() -> None:
    net, moments = make_net(ours), []
    log = EventLog()
    loss = net(batch()).sum()  # no input needs a gradient: no post-backward for root and block 0
    queue = torch.autograd.Variable._execution_engine.queue_callback

    def look(*_: object) -> None:  # queued before the engine's own, so it runs before it
        queue(lambda: moments.append(unsharded(net)))

    loss.register_hook(look)
    with observe(log):
        loss.backward()
    assert moments == [["root", "0"]]
    assert lifecycle(log)[-11:-4] == [
        "wait 0",
        "post_backward 0",
        "reshard 0",
        "reduce 0",
        "post_backward root",
        "reshard root",
        "reduce root",
    ]
    assert_all_returned(net)


@pytest.mark.parametrize("reshard", [True, False, None])
@distributed(2)
def test_a_graph_that_is_retained_can_run_backward_twice(reshard: bool | None) -> None:
    def scenario(shard: Shard) -> tuple[nn.Module, Recorder]:
        net = make_net(shard, reshard_after_forward=reshard)
        recorder = record(net)
        loss = net(batch()).square().sum()
        loss.backward(retain_graph=True)
        recorder.clear()
        loss.backward()
        return net, recorder

    mine, _ = compare_with_torch(scenario)
    assert mine.recorder.reductions == gathered("2 1 0 root")

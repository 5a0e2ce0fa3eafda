"""DESIGN's recompute lease: activation checkpointing of both variants, wherever the checkpoint is.

Torch's own ``fully_shard`` on the same model and inputs is the oracle of the gather order, the same
model without checkpointing that of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard.sharding.base.states import LeaseKind, ShardedState
from support.events.models import leaf_batch as batch
from support.events.models import make_inputs, make_net
from support.events.recorder import (
    Outcome,
    Recorder,
    Shard,
    assert_all_returned,
    assert_close_to,
    averaged_gradients,
    compare_with_torch,
    full_gradients,
    group_of,
    ours,
    record,
)
from support.modules import Assembled
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


def against_torch_and_plain(run: Run, reentrant: bool, **arguments: Any) -> tuple[Outcome, Outcome]:
    """The outcomes of ``run``, once their gathers and gradients were compared.

    Over two steps, so that a lease that was left behind would show.
    """
    steps = 2

    def scenario(shard: Shard) -> tuple[nn.Module, Recorder]:
        net = make_net(shard, **arguments)
        recorder = record(net)
        for _ in range(steps):
            run(net, reentrant)
        return net, recorder

    outcomes = compare_with_torch(scenario)
    plain = make_net(None, blocks=arguments.get("blocks", 3))
    for _ in range(steps):
        (one_step if run is whole_model else run)(plain, reentrant)
    assert_close_to(outcomes[0].gradients, averaged_gradients(plain))
    return outcomes


# -- where the checkpoint is ----------------------------------------------------------------------


@pytest.mark.cross
@RESHARD
@REENTRANT
@distributed(2)
def test_a_checkpoint_outside_a_sharded_block(reentrant: bool, reshard: bool | None) -> None:
    mine, _ = against_torch_and_plain(
        one_step, reentrant, outer=reentrant, reshard_after_forward=reshard
    )
    assert len(mine.recorder.reductions) == 8, "each group once per backward"


@pytest.mark.cross
@RESHARD
@REENTRANT
@distributed(2)
def test_a_checkpoint_inside_a_sharded_block(reentrant: bool, reshard: bool | None) -> None:
    mine, _ = against_torch_and_plain(
        one_step, reentrant, inner=reentrant, reshard_after_forward=reshard
    )
    assert len(mine.recorder.reductions) == 8


@pytest.mark.cross
@RESHARD
@REENTRANT
@distributed(2)
def test_nested_sharded_modules_inside_a_checkpointed_block(
    reentrant: bool, reshard: bool | None
) -> None:
    mine, _ = against_torch_and_plain(
        one_step, reentrant, nested=True, outer=reentrant, reshard_after_forward=reshard, blocks=2
    )
    assert len(mine.recorder.reductions) == 10


@REENTRANT
@distributed(2)
def test_nested_sharded_modules_with_the_checkpoint_between_them(reentrant: bool) -> None:
    against_torch_and_plain(one_step, reentrant, nested=True, inner=reentrant, blocks=2)


@REENTRANT
@distributed(2)
def test_a_checkpoint_inside_a_checkpoint(reentrant: bool) -> None:
    against_torch_and_plain(one_step, reentrant, outer=reentrant, inner=reentrant, blocks=2)


@pytest.mark.cross
@pytest.mark.parametrize("nested", [False, True])
@RESHARD
@REENTRANT
@distributed(2)
def test_a_checkpoint_of_the_whole_model(
    reentrant: bool, reshard: bool | None, nested: bool
) -> None:
    against_torch_and_plain(
        whole_model, reentrant, reshard_after_forward=reshard, nested=nested, blocks=2
    )


@pytest.mark.parametrize("nested", [False, True])
@distributed(2)
def test_two_forwards_then_the_backward_of_both(nested: bool) -> None:
    # True for the root too: else torch gathers it once more, which ours holds for the first graph.
    mine, _ = against_torch_and_plain(
        two_forwards, False, outer=False, nested=nested, blocks=2, reshard_after_forward=True
    )
    groups = len(set(mine.recorder.gathers))
    assert len(mine.recorder.reductions) == 2 * groups, "each group once per backward"


@pytest.mark.parametrize("nested", [False, True])
@distributed(2)
def test_two_reentrant_forwards_then_the_backward_of_both(nested: bool) -> None:
    # No comparison with torch, which loses the gradient of one of the forwards.
    net = make_net(ours, outer=True, nested=nested, blocks=2, reshard_after_forward=True)
    recorder, plain = record(net), make_net(None, blocks=2)
    for _ in range(2):
        two_forwards(net, True)
        two_forwards(plain, True)
    names = ["0.up", "0.down", "1.up", "1.down"] if nested else ["0", "1"]
    forward = ["root", *(f"blocks.{name}" for name in names)]
    backward = ["root", *(f"blocks.{name}" for name in reversed(names))]
    assert recorder.gathers == 2 * (2 * forward + 2 * backward)
    assert_close_to(full_gradients(net), averaged_gradients(plain))
    assert_all_returned(net)


@distributed(4)
def test_four_ranks_agree_with_torch_too() -> None:
    for reentrant in (False, True):
        against_torch_and_plain(one_step, reentrant, outer=reentrant, blocks=2)


# -- the lease itself -----------------------------------------------------------------------------


@REENTRANT
@distributed(2)
def test_a_recomputation_hands_its_lease_to_the_backward_that_follows(reentrant: bool) -> None:
    net = make_net(ours, nested=True, outer=reentrant, blocks=1)
    up, seen = group_of(net.blocks[0].up), []

    def look(*_: object) -> None:
        leases = [kind for kind in LeaseKind if up.leases.count(kind)]
        seen.append((up.state, leases))

    # runs in the forward, in the recomputation, and nowhere else
    net.blocks[0].down.register_forward_pre_hook(look)
    net(batch()).sum().backward()
    assert seen == [
        (ShardedState.SHARDED, []),
        (ShardedState.UNSHARDED, [LeaseKind.RECOMPUTE]),
    ]
    assert_all_returned(net)


@distributed(2)
def test_a_recomputation_whose_output_needs_no_gradient_returns_its_lease() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        def inside(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(m.trained(torch.tanh(m.frozen(x))))

        return checkpoint(inside, x, use_reentrant=False)

    seen: list[tuple[ShardedState, bool]] = []

    def scenario(shard: Shard) -> tuple[nn.Module, Recorder]:
        torch.manual_seed(0)
        model = Assembled(forward, frozen=nn.Linear(8, 8), trained=nn.Linear(8, 8))
        model.frozen.requires_grad_(False)
        for part in (model.frozen, model.trained):
            shard(part)
        shard(model)
        # itself, hence nothing: else torch's prefetch gathers the frozen one, which has no backward
        model.trained.set_modules_to_backward_prefetch([model.trained])
        recorder = record(model)
        if shard is ours:
            frozen = group_of(model.frozen)
            model.trained.register_forward_pre_hook(
                lambda *_: seen.append((frozen.state, bool(frozen.leases.out)))
            )
        model(make_inputs(dist.get_rank())).sum().backward()
        return model, recorder

    compare_with_torch(scenario)
    assert seen == [(ShardedState.SHARDED, False)] * 2, "in forward and in the recomputation"


@distributed(2)
def test_a_recomputation_that_an_exception_stops_leaves_no_lease_behind() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        def inside(x: torch.Tensor) -> torch.Tensor:
            y = m.second(torch.tanh(m.first(x)))
            m.finished += 1
            return y

        return checkpoint(inside, x, use_reentrant=False)

    models = []

    def scenario(shard: Shard) -> tuple[nn.Module, Recorder]:
        torch.manual_seed(0)
        layers = {name: nn.Linear(8, 8) for name in ("first", "second")}
        model = Assembled(forward, **layers, finished=0)
        for part in (model.first, model.second):
            shard(part)
        shard(model)
        recorder = record(model)
        models.append(model)
        model(batch()).sum().backward()
        return model, recorder

    compare_with_torch(scenario)
    assert [model.finished for model in models] == [1, 1], "the recomputation was cut short"


@REENTRANT
@distributed(2)
def test_a_recomputed_output_that_no_backward_uses_returns_at_the_end_of_backward(
    reentrant: bool,
) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        def inside(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.tanh(m.left(x)), torch.tanh(m.right(x))

        return checkpoint(inside, x, use_reentrant=reentrant)[0]

    def scenario(shard: Shard) -> tuple[nn.Module, Recorder]:
        torch.manual_seed(0)
        model = Assembled(forward, left=nn.Linear(8, 8), right=nn.Linear(8, 8))
        for part in (model.left, model.right):
            shard(part)
        shard(model)
        recorder = record(model)
        model(batch()).sum().backward()
        return model, recorder

    mine, _ = compare_with_torch(scenario)
    gradient = mine.gradients["right.weight"]
    if reentrant:  # backward gives the unused output a gradient of zeros
        assert gradient is not None and not gradient.any()
    else:
        assert gradient is None


@REENTRANT
@distributed(2)
def test_a_checkpointed_output_that_is_dropped_leaves_nothing(reentrant: bool) -> None:
    # For non-reentrant checkpointing "at once" would be too much to ask on CPU: a collective that
    # was issued inside holds the checkpoint's hooks until gloo's own thread lets go of it.
    net = make_net(ours, outer=reentrant, reshard_after_forward=False)
    output = net(batch())
    del output
    if reentrant:  # its forward ran without gradients: kept until the parameters change
        leases = [group_of(block).leases for block in net.blocks]
        assert {kind for each in leases for kind in LeaseKind if each.count(kind)} == {
            LeaseKind.KEPT
        }
        net.parameters_changed()
    net(batch()).sum().backward()
    assert_all_returned(net)

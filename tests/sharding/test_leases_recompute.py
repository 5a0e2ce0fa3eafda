"""DESIGN's recompute lease: activation checkpointing of both variants, wherever the checkpoint is.

Torch's own ``fully_shard`` on the same model and inputs is the oracle of the gather order, the same
model without checkpointing that of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard.sharding.base.states import LeaseKind, ShardedState
from support.events.models import leaf_batch as batch
from support.events.models import make_net
from support.events.recorder import (
    Recorder,
    Shard,
    against_torch,
    assert_all_returned,
    assert_close_to,
    averaged_gradients,
    full_gradients,
    group_of,
    ours,
    record,
)
from support.modules import Assembled
from support.ranks import distributed

REENTRANT = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
RESHARD = pytest.mark.parametrize("reshard", [True, False, None])


# -- where the checkpoint is ----------------------------------------------------------------------


def one_step(net: nn.Module) -> None:
    """Forward and backward, each block as it was built."""
    net(batch()).square().sum().backward()


def two_forwards(net: nn.Module) -> None:
    (net(batch(seed=1)).square().sum() + net(batch(seed=2)).sum()).backward()


WHERE: dict[str, Callable[[bool], dict[str, Any]]] = {
    "around blocks": lambda reentrant: {"outer": reentrant},
    "inside blocks": lambda reentrant: {"inner": reentrant},
    "around nested modules": lambda reentrant: {"outer": reentrant, "nested": True, "blocks": 2},
    "between nested modules": lambda reentrant: {"inner": reentrant, "nested": True, "blocks": 2},
    "in a checkpoint": lambda reentrant: {"outer": reentrant, "inner": reentrant, "blocks": 2},
    "around the model": lambda reentrant: {"blocks": 2},
    "around a model of nested modules": lambda reentrant: {"nested": True, "blocks": 2},
}


@pytest.mark.cross
@pytest.mark.parametrize("where", WHERE)
@RESHARD
@REENTRANT
@distributed(2, 4, matrix=[4])
def test_a_checkpoint_gathers_as_torchs_and_has_the_gradients_of_none(
    reentrant: bool, reshard: bool | None, where: str
) -> None:
    """Over two steps, so that a lease that was left behind would show."""
    options = WHERE[where](reentrant)

    def run(net: nn.Module, recorder: Recorder) -> None:
        for _ in range(2):
            if where.startswith(("around the model", "around a model")):
                checkpoint(net, batch(), use_reentrant=reentrant).square().sum().backward()
            else:
                one_step(net)

    mine, _ = against_torch(run, reshard_after_forward=reshard, **options)
    groups = len(set(mine.recorder.gathers))
    assert len(mine.recorder.reductions) == 2 * groups, "each group once per backward"
    plain = make_net(None, blocks=options.get("blocks", 3))
    for _ in range(2):
        one_step(plain)
    assert_close_to(mine.gradients, averaged_gradients(plain))


@pytest.mark.parametrize("nested", [False, True])
@REENTRANT
@distributed(2)
def test_two_forwards_then_the_backward_of_both(reentrant: bool, nested: bool) -> None:
    # True for the root too: else torch gathers it once more, which ours holds for the first graph.
    options: dict[str, Any] = {
        "outer": reentrant,
        "nested": nested,
        "blocks": 2,
        "reshard_after_forward": True,
    }
    if reentrant:  # no comparison with torch, which loses the gradient of one of the forwards
        net = make_net(ours, **options)
        recorder = record(net)
        for _ in range(2):
            two_forwards(net)
        assert_all_returned(net)
        gradients = full_gradients(net)
        names = ["0.up", "0.down", "1.up", "1.down"] if nested else ["0", "1"]
        forward, backward = (
            ["root", *(f"blocks.{name}" for name in order)] for order in (names, reversed(names))
        )
        assert recorder.gathers == 2 * (2 * forward + 2 * backward)
    else:

        def run(net: Any, _: Any) -> None:
            for _ in range(2):
                two_forwards(net)

        mine, _ = against_torch(run, **options)
        gradients, groups = mine.gradients, len(set(mine.recorder.gathers))
        assert len(mine.recorder.reductions) == 2 * groups, "each group once per backward"
    plain = make_net(None, blocks=2)
    for _ in range(2):
        two_forwards(plain)
    assert_close_to(gradients, averaged_gradients(plain))


# -- the lease itself -----------------------------------------------------------------------------


def make_two(shard: Shard, forward: Callable[..., Any]) -> Any:
    """Two sharded layers in a sharded model whose forward is given; a number that counts."""
    torch.manual_seed(0)
    model = Assembled(forward, first=nn.Linear(8, 8), second=nn.Linear(8, 8), finished=0)
    for module in (model.first, model.second, model):
        shard(module)
    return model


@distributed(2)
def test_a_recomputation_whose_output_needs_no_gradient_returns_its_lease() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        def inside(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(m.second(torch.tanh(m.first(x))))

        return checkpoint(inside, x, use_reentrant=False)

    seen: list[tuple[ShardedState, bool]] = []

    def make(shard: Shard) -> nn.Module:
        model = make_two(shard, forward)
        model.first.requires_grad_(False)
        # itself, hence nothing: else torch's prefetch gathers the frozen one, which has no backward
        model.second.set_modules_to_backward_prefetch([model.second])
        if shard is ours:
            frozen = group_of(model.first)
            model.second.register_forward_pre_hook(
                lambda *_: seen.append((frozen.state, bool(frozen.leases.out)))
            )
        return model

    against_torch(lambda model, _: model(batch().detach()).sum().backward(), make=make)
    assert seen == [(ShardedState.SHARDED, False)] * 2, "in forward and in the recomputation"


@distributed(2)
def test_a_recomputation_that_an_exception_stops_leaves_no_lease_behind() -> None:
    finished = []

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        def inside(x: torch.Tensor) -> torch.Tensor:
            y = m.second(torch.tanh(m.first(x)))
            m.finished += 1
            return y

        return checkpoint(inside, x, use_reentrant=False)

    def run(model: Any, recorder: Recorder) -> None:
        model(batch()).sum().backward()
        finished.append(model.finished)

    against_torch(run, make=make_two, forward=forward)
    assert finished == [1, 1], "the recomputation was cut short"


@REENTRANT
@distributed(2)
def test_a_recomputed_output_that_no_backward_uses_returns_at_the_end_of_backward(
    reentrant: bool,
) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        def inside(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.tanh(m.first(x)), torch.tanh(m.second(x))

        return checkpoint(inside, x, use_reentrant=reentrant)[0]

    mine, _ = against_torch(
        lambda model, _: model(batch()).sum().backward(), make=make_two, forward=forward
    )
    gradient = mine.gradients["second.weight"]
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
        assert {kind for each in leases for kind in each.out} == {LeaseKind.KEPT}
        net.parameters_changed()
    net(batch()).sum().backward()
    assert_all_returned(net)

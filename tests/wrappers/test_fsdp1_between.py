"""What a user sees and may do between a forward of FSDP1's wrapper and its backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.tensor import DTensor

from fullshard.comm import EventKind, EventLog, observe
from fullshard.insight import debug_mode
from support.fsdp1_fronts import (
    OURS,
    TORCH,
    Front,
    equal,
    full_state,
    gradients,
    loss_of,
    mean_gradients,
    quiet,
    rows,
    sgd,
    steps_of,
    unsharded_steps,
    up_to_order,
)
from support.ranks import distributed
from support.surface.model import build
from support.surface.ranks import everyone

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


def _with_gradients(front: Front, strategy: str, *, grad: bool) -> list[set[str]]:
    """Which parameters have a gradient on any rank: after a backward, a forward, its backward."""
    model = front.wrapped(sharding_strategy=strategy)
    optimizer = sgd(model)

    def found() -> set[str]:
        named = {
            name.replace("_fsdp_wrapped_module.", "")
            for name, param in model.named_parameters()
            if param.grad is not None
        }
        return set().union(*everyone(named))

    with quiet():
        loss_of(model(rows(0))).backward()
        seen = [found()]
        with torch.set_grad_enabled(grad):
            loss = loss_of(model(rows(1)))
        seen.append(found())
        optimizer.zero_grad()
        if grad:
            loss.backward()
            seen.append(found())
    return seen


@pytest.mark.cross
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2, 4, matrix=[4])
def test_gradients_of_an_earlier_backward_are_there_where_torch_has_them(
    strategy: str, grad: bool
) -> None:
    ours, theirs = (_with_gradients(front, strategy, grad=grad) for front in (OURS, TORCH))
    if strategy == "SHARD_GRAD_OP" and not grad:
        theirs[1] = set()  # full parameters stay for the next forward, and have none
    assert ours == theirs
    assert ours[0] == {name for name, _ in build().named_parameters()}


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2, 4, matrix=[4])
def test_what_is_shown_between_changes_no_gradient_and_no_gather(strategy: str) -> None:
    model, reference = OURS.wrapped(sharding_strategy=strategy), build()
    for step in range(3):
        log = EventLog()
        with observe(log):
            loss = loss_of(model(rows(step)))
            if step:
                shown = dict(model.named_parameters())
                kept = strategy == "SHARD_GRAD_OP"
                assert all(isinstance(param, DTensor) is not kept for param in shown.values())
                if not kept:
                    same = up_to_order if strategy == "NO_SHARD" else equal
                    same(gradients(model), gradients(reference))
            loss.backward()
        mean_gradients(reference, step)
        same = up_to_order if strategy == "NO_SHARD" else equal
        same(gradients(model), gradients(reference))
        names = [event.name for event in log.of(EventKind.UNSHARD)]
        assert names.count("(root)") == 1  # which stay in memory until its backward


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_layers_of_the_root_that_backward_runs_again_have_full_parameters(strategy: str) -> None:
    found = []
    for net in (OURS.wrapped(sharding_strategy=strategy), build()):
        apply_activation_checkpointing(net, check_fn=lambda module: isinstance(module, nn.Linear))
        found.append(steps_of(OURS, net) if hasattr(net, "instance") else unsharded_steps(net))
    assert found[0][0] == found[1][0]
    equal(list(found[0][1].values()), list(found[1][1].values()))


@distributed(2)
def test_an_optimizer_that_is_built_between_has_what_it_steps() -> None:
    model, reference = OURS.wrapped(), OURS.wrapped()
    early = sgd(reference)
    losses = [loss_of(each(rows(0))) for each in (model, reference)]
    late = sgd(model)
    for loss, optimizer in zip(losses, (late, early), strict=True):
        loss.backward()
        optimizer.step()
    equal(full_state(OURS, model), full_state(OURS, reference))


@distributed(2)
def test_in_debug_mode_a_change_of_full_parameters_between_is_an_assertion_error_as_torchs() -> (
    None
):
    with debug_mode():
        for front in (OURS, TORCH):
            model = front.wrapped(
                sharding_strategy="SHARD_GRAD_OP",
                auto_wrap_policy=front.wrap.ModuleWrapPolicy({nn.Linear}),
            )
            with quiet():
                loss = loss_of(model(rows(0)))
            layer: Any = model.module.stem.module
            layer.weight.data = layer.weight.clone()
            with pytest.raises(AssertionError, match=r"chang(ed|ing)"):
                loss.backward()


@pytest.mark.cross
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("nested", [True, False])
@distributed(2)
def test_what_was_wrapped_is_wrapped_again_and_both_are_one(nested: bool, strategy: str) -> None:
    for front in (OURS, TORCH):
        policy = front.wrap.ModuleWrapPolicy({nn.Linear}) if nested else None
        options: dict[str, Any] = {"sharding_strategy": strategy}
        options["use_orig_params"] = False  # else torch's raises
        model = front.wrapped(auto_wrap_policy=policy, **options)
        optimizer = sgd(model)
        inner = model._fsdp_wrapped_module
        with quiet():
            for step in range(2):
                loss_of(model(rows(step))).backward()
                optimizer.step()
                optimizer.zero_grad()
            output = model(rows(2))
            again = front.wrapped(inner, auto_wrap_policy=None, **options)
            equal(again(rows(2)), output)
    model, again = (OURS.wrapped(build(), sharding_strategy=strategy) for _ in range(2))
    again = OURS.wrapped(again._fsdp_wrapped_module, sharding_strategy=strategy)
    equal(steps_of(OURS, again), steps_of(OURS, model))
    equal(dict(again.state_dict()), dict(model.state_dict()))


@distributed(2)
def test_wrapping_again_with_arguments_of_another_meaning_is_refused() -> None:
    model = OURS.wrapped()
    with pytest.raises(ValueError, match="FSDPNet was wrapped before"):
        OURS.wrapped(model._fsdp_wrapped_module, sharding_strategy="NO_SHARD")

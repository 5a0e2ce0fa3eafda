"""Event orders of groups of several modules, and of groups used through a tied weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fullshard.comm import EventKind, EventLog, observe
from support.events.models import DIM, batch
from support.events.recorder import (
    Recorder,
    Shard,
    assert_all_returned,
    assert_close_to,
    averaged_gradients,
    compare_with_torch,
    full_gradients,
    lifecycle,
    ours,
    record,
    shard_with_torch,
)
from support.modules import Assembled
from support.ranks import distributed


def events_of(action: Any) -> list[str]:
    """The life-cycle events while ``action`` runs."""
    log = EventLog()
    with observe(log):
        action()
    return lifecycle(log)


def block_forward(name: str) -> list[str]:
    """A block that nobody gathered ahead, from its pre-forward to its resharding."""
    kinds = ("pre_forward", "unshard", "wait", "post_forward", "reshard")
    return [f"{kind} {name}" for kind in kinds]


# -- a list of modules ----------------------------------------------------------------------------


def _pair(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = model.middle(torch.tanh(model.first(x)))
    out: torch.Tensor = model.last(torch.tanh(x)) if model.runs_last else x
    return out


def make_pair(shard: Shard) -> Any:
    """Two linears that are one group, called by the first, around one that is the root's."""
    torch.manual_seed(0)
    names = ("first", "last", "middle")
    layers = {name: nn.Linear(DIM, DIM) for name in names}
    pair = Assembled(_pair, **layers, runs_last=True)
    if shard is not None:
        shard([pair.first, pair.last])
        shard(pair)
    return pair


@distributed(2, 4)
def test_the_events_of_a_list_of_modules() -> None:
    pair = make_pair(ours)
    group = "first, last"
    assert events_of(lambda: pair(batch(requires_grad=True)).sum().backward()) == [
        "pre_forward root",
        "unshard root",
        "wait root",
        f"pre_forward {group}",
        f"unshard {group}",
        f"wait {group}",
        f"post_forward {group}",
        f"pre_forward {group}",
        f"post_forward {group}",
        f"reshard {group}",
        "post_forward root",
        # the root returns the last module's output, so its hook is the second on the same tensor
        f"pre_backward {group}",
        f"unshard {group}",
        f"wait {group}",
        "pre_backward root",
        f"post_backward {group}",
        f"reshard {group}",
        f"reduce {group}",
        "post_backward root",
        "reshard root",
        "reduce root",
        f"reduce_done {group}",
        "reduce_done root",
    ]


@pytest.mark.parametrize("grad", [False, True], ids=["plain-input", "grad-input"])
@pytest.mark.parametrize("reshard", [True, False, None])
@distributed(2)
def test_a_list_of_modules_gathers_and_reduces_as_torchs(reshard: bool | None, grad: bool) -> None:
    def scenario(shard: Shard) -> tuple[nn.Module, Recorder]:
        pair = make_pair(lambda m: shard(m, reshard_after_forward=reshard))
        recorder = record(pair)
        for _ in range(2):
            pair(batch(requires_grad=grad)).square().sum().backward()
        return pair, recorder

    mine, theirs = compare_with_torch(scenario)
    assert sorted(mine.recorder.reductions) == sorted(theirs.recorder.reductions)


def _listed(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.tail(torch.tanh(model.first(model.head(x))))


def make_listed(shard: Shard) -> Any:
    """Two linears that are one group, of which the second never runs, between two others."""
    torch.manual_seed(0)
    names = ("head", "first", "unused", "tail")
    model = Assembled(_listed, **{name: nn.Linear(DIM, DIM) for name in names})
    for part in (model.head, [model.first, model.unused], model.tail, model):
        shard(part)
    return model


@pytest.mark.parametrize("reshard", [True, None])
@distributed(2)
def test_a_list_of_which_one_module_does_not_run_is_gathered_ahead_in_backward(
    reshard: bool | None,
) -> None:
    """As often as by torch's own, which counts such a list as the last that ran.

    So torch's own gathers it before the modules that ran after it, and is not compared in that.
    """
    gathers = []
    for shard in (ours, shard_with_torch):
        model = make_listed(lambda m, shard=shard: shard(m, reshard_after_forward=reshard))
        recorder = record(model)
        for _ in range(2):
            recorder.clear()
            model(batch(requires_grad=True)).square().sum().backward()
        gathers.append(recorder.gathers)
    forward, backward = ["head", "first", "tail"], ["tail", "first", "head"]
    assert gathers[0] == [*forward, *backward]
    assert sorted(gathers[1]) == sorted(gathers[0])

    model = make_listed(lambda m: ours(m, reshard_after_forward=reshard))
    loss = model(batch(requires_grad=True)).sum()
    log = EventLog()
    with observe(log):
        loss.backward()
    assert log.named(EventKind.PREFETCH) == ["first, unused", "head"]


@distributed(2)
def test_a_list_of_which_one_module_does_not_run_is_resharded_and_reduced_all_the_same() -> None:
    pair = make_pair(ours)
    for runs_last in (False, True, False):
        pair.runs_last = runs_last
        pair.zero_grad()
        recorder = record(pair)
        pair(batch(requires_grad=True)).sum().backward()
        assert_all_returned(pair)
        assert recorder.reductions == ["first", "root"]
        gradients = full_gradients(pair)
        assert (gradients["last.weight"] is not None) == runs_last


@distributed(2)
def test_a_retained_graph_of_a_list_of_modules_runs_backward_twice() -> None:
    pair, plain = make_pair(ours), make_pair(None)  # type: ignore[arg-type]  # None leaves it whole
    for model in (pair, plain):
        loss = model(batch(requires_grad=True)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_close_to(full_gradients(pair), averaged_gradients(plain))
    assert_all_returned(pair)


@distributed(2)
def test_a_group_used_only_through_a_tied_weight_is_returned_and_reduced() -> None:
    def tied_model() -> Any:
        layers = (nn.Linear(DIM, DIM, bias=False) for _ in range(2))
        model = Assembled(
            lambda m, x: torch.tanh(m.head(x)), embedding=next(layers), head=next(layers)
        )
        model.head.weight = model.embedding.weight
        return model

    torch.manual_seed(0)
    plain = tied_model()
    torch.manual_seed(0)
    tied = tied_model()
    for module in (tied.embedding, tied.head, tied):
        ours(module)
    for model in (plain, tied):
        for _ in range(2):
            model(batch()).sum().backward()
    assert_close_to(full_gradients(tied), averaged_gradients(plain))
    assert_all_returned(tied)

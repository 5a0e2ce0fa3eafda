"""The parameter generation: what stayed unsharded is gathered anew once parameters changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard.sharding import FSDPModule, unsharded
from support.events.models import batch, make_net
from support.events.recorder import (
    Recorder,
    against_torch,
    assert_gradients_of,
    group_of,
    ours,
    record,
)
from support.ranks import distributed

BLOCKS = ("blocks.0", "blocks.1", "blocks.2")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd for-loop": lambda params: torch.optim.SGD(params, lr=0.1, foreach=False),
    "sgd foreach": lambda params: torch.optim.SGD(params, lr=0.1, foreach=True),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
}


def sharded_parameters(net: nn.Module) -> dict[str, Any]:
    """The sharded parameters by name; to be asked for while the model is sharded."""
    parameters = dict(net.named_parameters())
    assert all(hasattr(param, "full_tensor") for param in parameters.values())
    return parameters


def assert_fresh(net: nn.Module, sharded: dict[str, Any]) -> None:
    """A forward of ``net`` uses the values of its shards, with gradients and without.

    ``state_dict()`` would not do for the values: it reshards.
    """
    plain = make_net(None)
    plain.load_state_dict({name: param.full_tensor() for name, param in sharded.items()})
    wanted = plain(batch())
    with torch.no_grad():
        assert torch.equal(net(batch()), wanted)
    assert torch.equal(net(batch()), wanted)


@pytest.mark.cross
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "unshard", "unshard async", "kept"])
@distributed(2)
def test_what_stayed_unsharded_is_fresh_after_an_optimizer_step(how: str, optimizer: str) -> None:
    net = make_net(ours, reshard_after_forward=False)
    sharded = sharded_parameters(net)
    optim = OPTIMIZERS[optimizer](list(sharded.values()))
    net(batch()).sum().backward()
    stale = net(batch()).detach()
    if how.startswith("unshard"):
        for module in (net, *net.blocks):
            module.unshard(async_op=how.endswith("async"))
    elif how != "kept":
        with getattr(torch, how)():
            net(batch())
    else:
        net.set_reshard_after_backward(False)
        net(batch()).sum().backward()
    optim.step()
    assert_fresh(net, sharded)
    assert not torch.equal(net(batch()).detach(), stale)


@distributed(2)
def test_what_was_gathered_by_hand_before_the_parameters_changed_is_gathered_once_more() -> None:
    net = make_net(ours)
    sharded = sharded_parameters(net)
    optim = torch.optim.SGD(list(sharded.values()), lr=0.1)
    net(batch()).sum().backward()
    for module in (net, *net.blocks):
        module.unshard()
    optim.step()
    assert_fresh(net, sharded)
    for module in (net, *net.blocks):
        module.unshard()
    optim.step()
    recorder = record(net)
    net(batch())
    assert len(recorder.gathers) == 4


def _by_hand(net: Any, sharded: dict[str, Any]) -> None:
    for param in sharded.values():
        param.mul_(3)
    net.parameters_changed()


def _of_other_groups(net: Any, sharded: dict[str, Any]) -> None:
    """Each rank's optimizer leaves out another group, as one does that has no rows of it."""
    left_out = f"blocks.{dist.get_rank()}"
    step([each for name, each in sharded.items() if left_out not in name])


def _in_memory_of_shards(net: Any, sharded: dict[str, Any]) -> None:
    step([param.to_local().detach().requires_grad_() for param in sharded.values()])


def _in_copies(net: Any, sharded: dict[str, Any]) -> None:
    """As an optimizer whose parameters live elsewhere, or in another dtype."""
    copies = [param.detach().clone() for param in sharded.values()]
    step(copies)
    for param, copy in zip(sharded.values(), copies, strict=True):
        param.copy_(copy)


@pytest.mark.parametrize("change", [_by_hand, _of_other_groups, _in_memory_of_shards, _in_copies])
@distributed(2)
def test_parameters_that_change_in_other_ways_are_fresh(change: Callable[..., None]) -> None:
    net = make_net(ours, reshard_after_forward=False)
    sharded = sharded_parameters(net)
    with torch.no_grad():
        net(batch())
        change(net, sharded)
    assert_fresh(net, sharded)


def step(params: Iterable[torch.Tensor]) -> None:
    """Steps an optimizer of ``params``, with gradients of ones."""
    params = list(params)
    for param in params:
        param.grad = torch.ones_like(param)
    torch.optim.SGD(params, lr=0.1).step()
    for param in params:
        param.grad = None


def write_back(net: nn.Module) -> None:
    with unsharded(net, writeback=True):
        pass


def minimise(net: nn.Module) -> None:
    optim = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=2)

    def closure() -> torch.Tensor:
        optim.zero_grad()
        loss: torch.Tensor = net(batch()).square().sum()
        loss.backward()
        return loss

    optim.step(closure)


CHANGES: dict[str, Callable[[Any, nn.Module], object]] = {
    "a step of an optimizer of another sharded model": lambda other, plain: step(
        other.parameters()
    ),
    "a step of an unsharded model": lambda other, plain: step(plain.parameters()),
    "a step with a closure": lambda other, plain: minimise(plain),
    "a state dict": lambda other, plain: other.load_state_dict(other.state_dict()),
    "a write-back": lambda other, plain: write_back(other),
    "to say so": lambda other, plain: other.parameters_changed(),
    "to move it": lambda other, plain: other.double(),
}


@pytest.mark.parametrize("change", CHANGES)
@distributed(2)
def test_a_change_of_another_model_changes_nothing_here(change: str) -> None:
    net = make_net(ours, reshard_after_forward=False)
    other, plain, whole = make_net(ours), make_net(None), make_net(None)
    other(batch())
    recorder = record(net)
    with torch.no_grad():
        net(batch())
        with torch.enable_grad():
            CHANGES[change](other, plain)
        net(batch())
    assert len(recorder.gathers) == 4
    loss = net(batch(seed=2)).square().sum()
    CHANGES[change](other, plain)
    assert group_of(net.blocks[0]).leases.out, "the graph keeps what it holds"
    (loss + net(batch(seed=3)).square().sum()).backward()
    assert len(recorder.reductions) == 4
    (whole(batch(seed=2)).square().sum() + whole(batch(seed=3)).square().sum()).backward()
    assert_gradients_of(net, whole)


@pytest.mark.parametrize("change", ["step", "part of it", "state dict", "write-back", "to say so"])
@distributed(2)
def test_parameters_that_change_between_two_forwards_of_one_backward_do_as_under_torchs(
    change: str,
) -> None:
    def run(net: Any, recorder: Recorder) -> None:
        loss = net(batch(seed=2)).square().sum()
        if change == "step":
            step(net.parameters())
        elif change == "part of it":
            step(net.blocks[2].parameters())
        elif change == "state dict":
            net.load_state_dict({name: 2 * value for name, value in net.state_dict().items()})
        elif isinstance(net, FSDPModule):
            write_back(net) if change == "write-back" else net.parameters_changed()
            recorder.clear()
            recorder.calls += [f"gather {name}" for name in ("root", *BLOCKS)]
        (loss + net(batch(seed=3)).square().sum()).backward()

    against_torch(run, reshard_after_forward=True)


@distributed(2)
def test_a_backward_reaches_a_forward_of_earlier_parameters_after_a_later_one() -> None:
    """Only the end of backward ends the first forward, as its input requires no gradient."""
    torch.manual_seed(0)
    whole: Any = nn.Linear(8, 8)
    net: Any = ours(deepcopy(whole))
    for model in (net, whole):
        earlier = model(torch.ones(8))
        if model is net:
            net.parameters_changed()
        (earlier + model(torch.ones(8, requires_grad=True))).sum().backward()
    assert_gradients_of(net, whole)


class RecomputesTied(nn.Module):
    """Runs a layer, and then checkpoints a layer that has its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner = nn.Linear(8, 8), nn.Linear(8, 8)
        self.inner.weight = self.outer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape: that of ``x``."""
        found: torch.Tensor = checkpoint(self.inner, self.outer(x), use_reentrant=True)
        return found


@distributed(2)
def test_a_recomputation_reduces_after_a_forward_of_earlier_parameters() -> None:
    torch.manual_seed(0)
    whole: Any = RecomputesTied()
    net: Any = deepcopy(whole)
    for module in (net.inner, net):
        ours(module)
    recorder = record(net)
    for model in (net, whole):
        loss = model(torch.ones(8)).square().sum()
        if model is net:
            net.parameters_changed()
        loss.backward()
    assert_gradients_of(net, whole)
    assert len(recorder.reductions) == 2, "each group once"


@distributed(2)
def test_a_retained_graph_that_runs_again_beside_a_new_one_does_as_under_torchs() -> None:
    def run(net: Any, recorder: Recorder) -> None:
        net.set_requires_gradient_sync(False)
        loss = net(batch(seed=2)).square().sum()
        loss.backward(retain_graph=True)
        net.set_requires_gradient_sync(True)
        recorder.clear()
        (loss + net(batch(seed=3)).square().sum()).backward()

    against_torch(run)


@distributed(2)
def test_a_forward_that_ends_with_backward_is_reduced_with_one_that_ends_at_its_input() -> None:
    """After the reduction for the second forward, the first has gradients."""
    net, whole = make_net(ours), make_net(None)
    for model in (net, whole):
        loss = model(batch(seed=2)).square().sum()
        if isinstance(model, FSDPModule):
            model.parameters_changed()
        (loss + model(batch(seed=3).requires_grad_()).square().sum()).backward()
    assert_gradients_of(net, whole)


class Tied(nn.Module):
    """The last layer, under reentrant checkpointing, has the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.middle = nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Shape: ``[...]`` to ``[..., 8]``."""
        hidden = self.middle(self.first(tokens))
        output: torch.Tensor = checkpoint(self.last, hidden, use_reentrant=True)
        return output


@pytest.mark.parametrize("owner", ["first", "last"])
@distributed(2)
def test_a_tied_weight_is_reduced_with_all_its_gradients_after_parameters_changed(
    owner: str,
) -> None:
    torch.manual_seed(0)
    whole = Tied()
    net: Any = deepcopy(whole)
    for module in (net.get_submodule(owner), net):
        ours(module)
    for model in (net, whole):
        loss = model(torch.arange(8)).square().sum()
        if isinstance(model, FSDPModule):
            model.parameters_changed()
        loss.backward()
    assert not group_of(net).leases.out
    assert_gradients_of(net, whole)


@distributed(2)
def test_a_graph_of_an_earlier_step_on_one_rank_keeps_nothing_that_a_later_step_gathers() -> None:
    net = make_net(ours, reshard_after_forward=False)
    sharded = sharded_parameters(net)
    output = net(batch())
    kept = output if dist.get_rank() == 0 else None
    del output
    step(sharded.values())
    loss = net(batch(seed=2)).square().sum()
    loss.backward(retain_graph=True)
    assert all(param.grad is not None for param in sharded_parameters(net).values())
    recorder = record(net)
    loss.backward()
    assert len(recorder.gathers) == 4, "on every rank"
    del kept


@distributed(2)
def test_a_step_makes_copies_of_all_groups_of_its_root_stale_but_frozen_ones() -> None:
    net = make_net(ours, reshard_after_forward=False)
    with torch.no_grad():
        net(batch())
        net.blocks[1].reshard()  # an optimizer holds sharded parameters
        held = [net.blocks[1].up.weight]
        net.blocks[2].requires_grad_(False)
        net(batch())
        recorder = record(net)
        step(held)
        net(batch())
        assert recorder.gathers == ["root", "blocks.0", "blocks.1"]
        net.blocks[0].parameters_changed()
        net.parameters_changed(recurse=False)
        recorder.clear()
        net(batch())
        assert recorder.gathers == ["root", "blocks.0"]

"""The parameter generation: what stayed unsharded is gathered anew once parameters changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.sharding.generation import advance_generation, current_generation
from support.events_models import make_inputs, make_net
from support.events_recorder import Recorder, Shard, group_of, ours, record, shard_with_torch
from support.ranks import distributed

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd for-loop": lambda params: torch.optim.SGD(params, lr=0.1, foreach=False),
    "sgd foreach": lambda params: torch.optim.SGD(params, lr=0.1, foreach=True),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
}


def batch(**kwargs: Any) -> torch.Tensor:
    """This rank's inputs."""
    return make_inputs(dist.get_rank(), **kwargs)


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
@pytest.mark.parametrize("how", ["unshard", "unshard async", "no_grad", "kept after backward"])
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
    elif how == "no_grad":
        with torch.no_grad():
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


@distributed(2)
def test_loading_a_state_dict_is_a_change() -> None:
    net = make_net(ours, reshard_after_forward=False)
    sharded = sharded_parameters(net)
    state = {name: value.clone().mul_(2) for name, value in net.state_dict().items()}
    with torch.no_grad():
        net(batch())
    net.load_state_dict(state)
    assert_fresh(net, sharded)


@distributed(2)
def test_parameters_changed_by_hand_are_used_once_that_was_said() -> None:
    net = make_net(ours, reshard_after_forward=False)
    sharded = sharded_parameters(net)
    with torch.no_grad():
        net(batch())
        for param in sharded.values():
            param.mul_(3)
    net.parameters_changed()
    assert_fresh(net, sharded)


@distributed(2)
def test_moving_or_casting_a_model_is_a_change() -> None:
    net = make_net(ours, reshard_after_forward=False)
    with torch.no_grad():
        net(batch())
    net.double()
    with torch.no_grad():
        assert net(batch().double()).dtype is torch.float64


@distributed(2)
def test_nothing_is_gathered_twice_while_the_parameters_stay_the_same() -> None:
    net = make_net(ours, reshard_after_forward=False)
    net.set_reshard_after_backward(False)
    recorder = record(net)
    for _ in range(3):
        net(batch()).sum().backward()
    assert recorder.gathers == ["root", "blocks.0", "blocks.1", "blocks.2"]


@distributed(2)
def test_any_optimizer_of_the_process_makes_copies_stale_which_costs_a_gather_only() -> None:
    net = make_net(ours, reshard_after_forward=False)
    other = nn.Linear(2, 2)
    optim = torch.optim.SGD(other.parameters(), lr=0.1)
    recorder = record(net)
    with torch.no_grad():
        net(batch())
        other.weight.grad = torch.ones(2, 2)
        optim.step()
        net(batch())
    assert len(recorder.gathers) == 8


@distributed(2)
def test_a_step_between_forward_and_backward_does_not_pull_the_graph_away() -> None:
    net = make_net(ours, reshard_after_forward=False)
    plain = make_net(None)
    other = nn.Linear(2, 2)
    optim = torch.optim.SGD(other.parameters(), lr=0.1)
    other.weight.grad = torch.ones(2, 2)
    recorder = record(net)
    loss = net(batch()).sum()
    optim.step()
    assert group_of(net.blocks[0]).leases.held
    loss.backward()
    plain(batch()).sum().backward()
    assert len(recorder.gathers) == 4
    for mine, wanted in zip(net.parameters(), plain.parameters(), strict=True):
        dist.all_reduce(wanted.grad)
        torch.testing.assert_close(mine.grad.full_tensor(), wanted.grad / dist.get_world_size())


@distributed(2)
def test_a_training_loop_that_evaluates_equals_torchs_that_reshards() -> None:
    losses: list[list[float]] = []

    def train(shard: Shard) -> tuple[nn.Module, Recorder]:
        net = make_net(shard, reshard_after_forward=shard is not ours)
        recorder = record(net)
        optim = torch.optim.AdamW(list(net.parameters()), lr=0.05)
        losses.append([])
        for seed in range(4):
            optim.zero_grad()
            loss = net(batch(seed=seed)).square().mean()
            loss.backward()
            optim.step()
            with torch.no_grad():
                losses[-1].append(net(batch(seed=99)).square().mean().item())
        return net, recorder

    train(shard_with_torch)
    train(ours)
    theirs, mine = losses
    assert mine == pytest.approx(theirs, rel=1e-5)


def test_the_generation_only_moves_on() -> None:
    before = current_generation()
    advance_generation()
    assert current_generation() == before + 1

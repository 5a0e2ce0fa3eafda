"""Optimizers built before ``fully_shard`` step the shards; what was replaced holds no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from fullshard.sharding import fully_shard, rebind_optimizer, unsharded
from support.events.models import batch, make_net
from support.events.recorder import ours
from support.parity.compare import parameters_of
from support.products import few
from support.ranks import cpu_mesh, distributed
from support.surface.errors import says

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=2),
}


def shard(net: Any) -> Any:
    for block in net.blocks:
        ours(block)
    return ours(net)


def train(net: nn.Module, *optimizers: Any, steps: int = 3) -> None:
    """Steps of all optimizers, in a loop that clears gradients first."""
    for step in range(steps):

        def closure(step: int = step) -> float:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = net(batch(seed=step)).square().mean()
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            return mean.item()

        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(closure)
            else:
                if optimizer is optimizers[0]:
                    closure()
                optimizer.step()


def assert_same(net: nn.Module, wanted: nn.Module) -> None:
    expected = parameters_of(wanted)
    for name, value in parameters_of(net).items():
        other = expected[name]
        assert value is not None and other is not None
        assert torch.equal(value, other), name


def assert_holds(group: dict[str, Any], params: Any) -> None:
    """A group of an optimizer holds these parameters, in this order."""
    assert [id(param) for param in group["params"]] == [id(param) for param in params]


@pytest.mark.parametrize("name", few(OPTIMIZERS, "sgd", "adamw foreach", "adamw fused"))
@distributed(2)
def test_an_optimizer_from_before_trains_as_one_from_after(name: str) -> None:
    net, wanted = make_net(None), make_net(ours)
    before = OPTIMIZERS[name](net.parameters())
    shard(net)
    train(net, before)
    train(wanted, OPTIMIZERS[name](wanted.parameters()))
    assert_same(net, wanted)
    assert_holds(before.param_groups[0], net.parameters())


@distributed(2)
def test_groups_keep_their_options_and_the_order_of_their_parameters() -> None:
    def groups(net: Any) -> Any:
        return [
            {"params": list(net.blocks[1].parameters())[::-1], "lr": 0.3, "name": "one"},
            {"params": [("w", net.head.weight), ("b", net.head.bias)], "weight_decay": 0.2},
        ]

    def build(net: Any) -> tuple[torch.optim.Optimizer, Any]:
        named = groups(net)
        named[1]["params"] = [param for _, param in named[1]["params"]]
        optimizer = torch.optim.AdamW(named, lr=0.1)
        optimizer.add_param_group({"params": net.blocks[0].parameters(), "lr": 0.01})
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    net, wanted = make_net(None), make_net(ours)
    optimizer, schedule = build(net)
    shard(net)
    options = [each | {"params": None} for each in optimizer.param_groups]
    lists = [each["params"] for each in optimizer.param_groups]
    rebind_optimizer(optimizer)
    assert [each | {"params": None} for each in optimizer.param_groups] == options
    for each, kept in zip(optimizer.param_groups, lists, strict=True):
        assert each["params"] is kept
    assert_holds(optimizer.param_groups[0], list(net.blocks[1].parameters())[::-1])
    assert_holds(optimizer.param_groups[1], [net.head.weight, net.head.bias])
    other, other_schedule = build(wanted)
    for _ in range(2):
        train(net, optimizer, steps=1)
        schedule.step()
        train(wanted, other, steps=1)
        other_schedule.step()
    assert_same(net, wanted)


@distributed(2)
def test_several_optimizers_and_groups_added_later_are_rebound() -> None:
    net, wanted = make_net(None), make_net(ours)
    kept = list(net.blocks[2].parameters())
    one = torch.optim.SGD(net.blocks[0].parameters(), lr=0.1)
    two = torch.optim.AdamW(net.blocks[1].parameters(), lr=0.1)
    shard(net)
    train(net, one, two, steps=1)
    one.add_param_group({"params": kept, "lr": 0.05})
    train(net, one, two, steps=2)
    first = torch.optim.SGD(wanted.blocks[0].parameters(), lr=0.1)
    second = torch.optim.AdamW(wanted.blocks[1].parameters(), lr=0.1)
    train(wanted, first, second, steps=1)
    first.add_param_group({"params": wanted.blocks[2].parameters(), "lr": 0.05})
    train(wanted, first, second, steps=2)
    assert_same(net, wanted)


@distributed(2)
def test_an_optimizer_built_while_parameters_were_unsharded_is_rebound() -> None:
    net, wanted = make_net(ours), make_net(ours)
    with torch.no_grad():
        net(batch())  # the root stays unsharded
    assert not all(isinstance(param, DTensor) for param in net.parameters())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    with unsharded(wanted):
        other = torch.optim.AdamW(wanted.parameters(), lr=0.1)
    train(net, optimizer)
    train(wanted, other)
    assert_same(net, wanted)
    plain = make_net(ours)
    train(plain, torch.optim.AdamW(plain.parameters(), lr=0.1))
    assert_same(net, plain)


@distributed(2)
def test_state_for_a_replaced_parameter_is_an_error_with_the_cure() -> None:
    net = make_net(None)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(batch()).sum().backward()
    optimizer.step()
    shard(net)
    net(batch()).sum().backward()
    held = list(optimizer.param_groups[0]["params"])
    for _ in range(2):  # not only once
        with pytest.raises(
            RuntimeError,
            match=says("AdamW", "blocks.0.up.weight", "after fully_shard", "set_optimizer_state"),
        ):
            optimizer.step()
    assert_holds(optimizer.param_groups[0], held)
    assert all(param in optimizer.state for param in held), "nothing was changed"


@distributed(2)
def test_state_that_is_made_with_the_optimizer_counts() -> None:
    net = make_net(None)
    optimizer = torch.optim.Adagrad(net.parameters())
    shard(net)
    with pytest.raises(RuntimeError, match=says("Adagrad has state")):
        optimizer.step()


@distributed(2)
def test_before_its_first_step_it_sees_and_clears_the_gradients_of_the_shards() -> None:
    net = make_net(None)
    params = list(net.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    shard(net)
    net(batch()).sum().backward()
    once = [param.grad.full_tensor() for param in net.parameters()]
    for before, param in zip(params, net.parameters(), strict=True):
        assert before.grad is param.grad
    for to_none in (True, False):  # as where a step was skipped
        optimizer.zero_grad(set_to_none=to_none)
        assert all(param.grad is None or not param.grad.any() for param in net.parameters())
        net(batch()).sum().backward()
    for param, wanted in zip(net.parameters(), once, strict=True):
        assert torch.equal(param.grad.full_tensor(), wanted)


@distributed(2)
def test_a_rebound_optimizer_can_be_saved_before_its_first_step() -> None:
    net, wanted = make_net(None), make_net(ours)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    shard(net)
    rebind_optimizer(optimizer)
    other = torch.optim.AdamW(wanted.parameters(), lr=0.1)
    saved: Any = get_optimizer_state_dict(net, optimizer)
    expected: Any = get_optimizer_state_dict(wanted, other)
    assert saved["state"].keys() == expected["state"].keys() and len(saved["state"]) == 14
    assert saved["param_groups"] == expected["param_groups"]


# -- memory ---------------------------------------------------------------------------------------


@distributed(2)
def test_replaced_parameters_keep_no_memory_and_what_shares_it_keeps_its_values() -> None:
    net, whole = make_net(None), make_net(None)
    originals = dict(net.named_parameters())
    net(batch()).sum().backward()
    view = originals["head.weight"].detach()[1:3]
    row = originals["head.weight"].data
    state = net.state_dict()
    shard(net)
    for original in originals.values():
        assert original.untyped_storage().nbytes() == 0 and original.grad is None
    assert torch.equal(view, whole.head.weight[1:3])
    assert torch.equal(row, whole.head.weight)
    for name, value in whole.state_dict().items():
        assert torch.equal(state[name], value)
    assert torch.equal(net(batch()), whole(batch()))


@distributed(2)
def test_a_parameter_tied_to_a_module_that_is_sharded_later_is_found() -> None:
    net, whole = make_net(None), make_net(None)
    for each in (net, whole):
        each.head.weight = nn.Parameter(torch.ones(8, 8))
        each.blocks[0].extra = nn.Linear(8, 8, bias=False)
        each.blocks[0].extra.weight = each.head.weight
    shard(net)
    assert net.head.weight is net.blocks[0].extra.weight
    assert torch.equal(net(batch()), whole(batch()))


@distributed(2)
def test_ignored_parameters_and_those_on_the_meta_device_stay_as_they_are() -> None:
    mesh = cpu_mesh()
    module = nn.Linear(3, 2)
    weight: Any = module.weight
    fully_shard(module, mesh=mesh, ignored_params={weight})
    assert module.weight is weight and weight.numel() == 6
    with torch.device("meta"):
        ghost = nn.Linear(3, 2)
    before = ghost.weight
    optimizer = torch.optim.SGD(ghost.parameters(), lr=0.1)
    fully_shard(ghost, mesh=mesh)
    ghost.to_empty(device="cpu")
    nn.init.ones_(ghost.weight)
    nn.init.ones_(ghost.bias)
    ghost(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert before is not ghost.weight
    assert_holds(optimizer.param_groups[0], ghost.parameters())
    assert isinstance(ghost.weight, DTensor)
    assert torch.equal(ghost.weight.full_tensor(), torch.full((2, 3), 0.9))

"""Errors while training: a forward or backward that raises, calls at the wrong moment, copies."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.comm import EventLog, observe
from fullshard.sharding import fully_shard
from fullshard.sharding.base.states import LeaseKind, ShardedState
from support.events.models import batch, make_inputs, make_net
from support.events.recorder import (
    assert_all_returned,
    assert_gradients_of,
    group_of,
    ours,
)
from support.failing import Planned, fail, fail_in_backward, failing
from support.modules import Assembled
from support.ranks import distributed
from support.surface.ranks import never_gathered

RESHARD = pytest.mark.parametrize("reshard", [True, False, None])


ERRORS: dict[str, Callable[[Any], torch.utils.hooks.RemovableHandle]] = {
    "before a block": lambda net: net.blocks[1].register_forward_pre_hook(fail),
    "inside a block": lambda net: net.blocks[1].up.register_forward_hook(fail),
    "after the head": lambda net: net.head.register_forward_hook(fail),
    "after the root": lambda net: net.register_forward_hook(fail),
    "in backward": lambda net: net.blocks[1].register_forward_hook(fail_in_backward),
}
FORWARD_ERRORS = [where for where in ERRORS if where != "in backward"]


def raise_one(net: Any, where: str) -> None:
    handle = ERRORS[where](net)
    with pytest.raises(Planned):
        net(batch(seed=7)).square().sum().backward()
    handle.remove()


def good_step(net: nn.Module) -> None:
    """One whole step, from gradients that are None."""
    net.zero_grad()
    net(batch()).square().sum().backward()


def assert_good_step(net: nn.Module) -> None:
    """A step has the gradients of the unsharded model, and leaves nothing behind."""
    good_step(net)
    plain = make_net(None)
    good_step(plain)
    assert_gradients_of(net, plain)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, seeds: list[int]) -> list[float]:
    """The losses of steps on inputs that are the same on all ranks."""
    losses = []
    for seed in seeds:
        optimizer.zero_grad()
        loss = net(make_inputs(0, seed=seed)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# -- what follows an error ------------------------------------------------------------------------


@pytest.mark.cross
@pytest.mark.parametrize("where", ERRORS)
@RESHARD
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
@distributed(2, 4, matrix=[4])
def test_after_an_error_on_every_rank_and_reset_iter_state_training_goes_on_as_without_it(
    first: bool, reshard: bool | None, where: str
) -> None:
    whole, net = make_net(None), make_net(ours, reshard_after_forward=reshard)
    mine, theirs = (torch.optim.AdamW(model.parameters(), lr=0.1) for model in (net, whole))
    steps = [] if first else [0, 1]
    assert train(net, mine, steps) == train(whole, theirs, steps)
    for model in (net, whole):
        model.zero_grad()
    raise_one(net, where)
    net.reset_iter_state()
    assert_all_returned(net)
    assert all(param.grad is None for param in net.parameters())
    assert train(net, mine, [2, 3]) == train(whole, theirs, [2, 3])
    for sharded, plain in zip(net.parameters(), whole.parameters(), strict=True):
        assert torch.equal(sharded.full_tensor(), plain)


@pytest.mark.cross
@pytest.mark.parametrize("where", FORWARD_ERRORS)
@RESHARD
@distributed(2)
def test_a_good_step_follows_a_forward_that_raises_on_every_rank(
    reshard: bool | None, where: str
) -> None:
    net = make_net(ours, reshard_after_forward=reshard)
    good_step(net)
    raise_one(net, where)
    assert_good_step(net)


@distributed(2)
def test_an_error_with_a_gather_in_flight_leaves_nothing_in_flight() -> None:
    net = make_net(ours)
    net.blocks[0].set_modules_to_forward_prefetch([net.blocks[1], net.blocks[2]])
    with failing(net.blocks[0].up):
        net(batch(seed=7))
    states = [group_of(block).state for block in net.blocks]
    assert states == [ShardedState.SHARDED] * 3, "the end of the root's forward returns them"
    assert_good_step(net)


@distributed(2)
def test_a_forward_that_raises_in_a_caught_branch_does_not_disturb_the_rest() -> None:
    def tries(m: Any, x: torch.Tensor) -> torch.Tensor:
        try:
            m.inside.blocks[0](x[:, :3])  # of no fitting shape
        except RuntimeError:
            x = m.inside.blocks[1](x)
        return m.inside.head(m.inside.blocks[0](x))

    model, plain = (Assembled(tries, inside=make_net(None)) for _ in range(2))
    for module in (*model.inside.blocks, model):
        ours(module)
    for _ in range(2):
        good_step(model)
    good_step(plain)
    assert_gradients_of(model, plain)


@RESHARD
@distributed(2)
def test_a_backward_that_raises_returns_its_leases_at_the_next_root_forward_which_warns(
    reshard: bool | None,
) -> None:
    net = make_net(ours, reshard_after_forward=reshard)
    good_step(net)
    raise_one(net, "in backward")
    held = [group_of(net), group_of(net.blocks[2])]
    assert any(group.leases.out for group in held), "the end-of-backward callback did not run"
    with pytest.warns(RuntimeWarning, match=r"last backward did not finish.*reset_iter_state"):
        assert_good_step(net)
    assert_good_step(net)


class Broken(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise Planned


def break_one_of_two(net: Any, x: torch.Tensor) -> None:
    """Two forwards; the first one's backward raises below the last layer, the second's is whole."""
    function: Any = Broken
    broken = net[1](function.apply(net[0](x))).sum()
    whole = net(x).square().sum()
    with pytest.raises(Planned):
        broken.backward()
    whole.backward()


@distributed(2)
def test_a_backward_after_one_that_raised_still_puts_its_gradients_in_place() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    net = copy.deepcopy(plain)
    for module in (*net, net):
        fully_shard(module)
    net(torch.ones(1, 3))  # makes net the root of its layers
    x = torch.randn(dist.get_world_size(), 5, 3)[dist.get_rank()]
    for model in (net, plain):
        break_one_of_two(model, x)
    assert_gradients_of(net, plain)


# -- reset_iter_state() by itself -----------------------------------------------------------------


@distributed(2)
def test_reset_drops_the_users_lease_and_what_was_gathered_ahead() -> None:
    net = make_net(ours, reshard_after_forward=False)
    good_step(net)
    net(batch())
    net.blocks[0].unshard()
    net.blocks[1].unshard(async_op=True)
    assert LeaseKind.USER in group_of(net.blocks[0]).leases.out
    net.reset_iter_state()
    assert_all_returned(net)
    assert all(hasattr(param, "placements") for param in net.parameters())
    assert_good_step(net)


@distributed(2)
def test_reset_is_for_the_root_only_and_does_nothing_before_the_first_forward() -> None:
    net = make_net(ours)
    log = EventLog()
    with observe(log):
        net.reset_iter_state()
        net.blocks[0].reset_iter_state()
    assert never_gathered(log)
    good_step(net)
    with pytest.raises(RuntimeError, match=r"reset_iter_state.*'blocks\.1', which is not the root"):
        net.blocks[1].reset_iter_state()
    net.reset_iter_state()
    assert_good_step(net)


# -- copies, and state dicts at the wrong moment --------------------------------------------------


@pytest.mark.parametrize(
    ("how", "copy_it"),
    [
        ("pickled", pickle.dumps),
        ("pickled", lambda each: torch.save(each, io.BytesIO())),
        ("deep-copied", copy.deepcopy),
    ],
)
@distributed(2)
def test_a_copy_or_pickle_of_a_module_is_refused_with_what_to_do_instead(
    how: str, copy_it: Callable[[Any], object]
) -> None:
    net = make_net(ours)
    for each in (net, nn.Sequential(net), {"model": net}):
        with pytest.raises(TypeError, match=rf"FSDPNet cannot be {how}.*state_dict"):
            copy_it(each)
    with pytest.raises(TypeError, match=f"FSDPBlock cannot be {how}"):
        copy_it(nn.ModuleList([net.blocks[0]]))
    copy_it(net.state_dict())


def _save(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Asks for a state dict in the middle of a forward."""
    x = model.linear(x)
    if model.armed and model.load:
        model.load_state_dict({"linear.weight": torch.ones(4, 4), "linear.bias": torch.ones(4)})
    elif model.armed:
        model.state_dict()
    return x


@pytest.mark.parametrize("load", [False, True], ids=["state_dict", "load_state_dict"])
@distributed(2)
def test_a_state_dict_in_the_middle_of_forward_is_an_error_and_a_good_step_follows(
    load: bool,
) -> None:
    torch.manual_seed(0)
    model = Assembled(_save, linear=nn.Linear(4, 4), load=load, armed=True)
    expected = model.linear(torch.ones(1, 4)).detach()
    net: Any = fully_shard(model)
    call = "load_state_dict" if load else "state_dict"
    with pytest.raises(RuntimeError, match=rf"{call}\(\) was called while .* forward"):
        net(torch.ones(1, 4))
    net.armed = False
    net.reset_iter_state()
    assert torch.equal(net(torch.ones(1, 4)), expected)
    assert list(net.state_dict()) == ["linear.weight", "linear.bias"]

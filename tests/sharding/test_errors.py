"""Errors while training: a forward or backward that raises, calls at the wrong moment, copies."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.comm import EventLog, observe
from fullshard.sharding import FSDPModule, fully_shard
from support.modules import Assembled
from support.ranks import distributed
from support.surface.model import Net, batch, build, sharded, train
from support.surface.ranks import assert_equal_state, everyone, full_parameters, never_gathered


class Planned(Exception):
    """The error that these tests raise on purpose."""


class _RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise Planned("backward")


def _raises_in_backward(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _RaiseInBackward.apply(x)  # type: ignore[no-untyped-call]  # torch's
    return result


def _raise(*args: Any) -> None:
    raise Planned("hook")


def _raise_before(net: Net) -> torch.utils.hooks.RemovableHandle:
    return net.head.register_forward_pre_hook(_raise)


def _raise_after(net: Net) -> torch.utils.hooks.RemovableHandle:
    return net.head.register_forward_hook(_raise)


def _raise_in_block(net: Net) -> torch.utils.hooks.RemovableHandle:
    block: Any = net.blocks[1]
    return block.fc2.register_forward_pre_hook(_raise)


def _raise_in_backward(net: Net) -> torch.utils.hooks.RemovableHandle:
    block: Any = net.blocks[0]
    return block.fc2.register_forward_pre_hook(lambda m, args: (_raises_in_backward(*args),))


ERRORS: dict[str, Callable[[Net], torch.utils.hooks.RemovableHandle]] = {
    "before the head": _raise_before,
    "after the head": _raise_after,
    "inside a block": _raise_in_block,
    "in backward": _raise_in_backward,
}


@pytest.mark.cross
@pytest.mark.parametrize("reshard", [True, False, None])
@pytest.mark.parametrize("where", ERRORS)
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
@distributed(2)
def test_after_an_error_on_every_rank_and_reset_iter_state_training_goes_on_as_without_it(
    where: str, reshard: bool | None, first: bool
) -> None:
    reference, net = build(), sharded(build(), reshard_after_forward=reshard)
    ours, theirs = (torch.optim.AdamW(model.parameters(), lr=0.1) for model in (net, reference))
    steps = [] if first else [0, 1]
    assert train(net, ours, steps) == train(reference, theirs, steps)

    handle = ERRORS[where](net)
    with pytest.raises(Planned):
        net(batch()).sum().backward()
    handle.remove()
    model: Any = net
    model.reset_iter_state()

    assert all(param.grad is None for param in net.parameters())
    assert train(net, ours, [2, 3]) == train(reference, theirs, [2, 3])
    assert_equal_state(full_parameters(net), full_parameters(reference))


@distributed(4)
def test_after_an_error_and_reset_iter_state_four_ranks_go_on_too() -> None:
    reference, net = build(), sharded(build())
    handle = _raise_in_block(net)
    with pytest.raises(Planned):
        net(batch())
    handle.remove()
    model: Any = net
    model.reset_iter_state()
    net(batch()).sum().backward()
    reference(batch()).sum().backward()
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        grad: Any = ours.grad
        torch.testing.assert_close(grad.full_tensor(), theirs.grad)


@distributed(2)
def test_reset_iter_state_drops_gradients_that_were_not_reduced() -> None:
    reference, net = build(), sharded(build())
    model: Any = net
    model.set_requires_gradient_sync(False)
    net(batch(7)).sum().backward()
    model.set_requires_gradient_sync(True)
    with pytest.warns(RuntimeWarning, match=r"without communication, are dropped in .*'blocks\.0'"):
        model.reset_iter_state()
    net(batch()).sum().backward()
    reference(batch()).sum().backward()
    grad: Any = net.head.weight.grad
    assert torch.equal(grad.full_tensor(), reference.head.weight.grad)


@distributed(2)
def test_reset_iter_state_leaves_every_parameter_sharded() -> None:
    net: Any = sharded(build(), reshard_after_forward=False)
    net(batch())
    net.blocks[0].unshard()
    net.reset_iter_state()
    for param in net.parameters():
        assert hasattr(param, "placements")


@distributed(2)
def test_reset_iter_state_before_any_forward_does_nothing() -> None:
    net: Any = sharded(build())
    log = EventLog()
    with observe(log):
        net.reset_iter_state()
        net.blocks[0].reset_iter_state()
    assert never_gathered(log)
    assert net(batch()).shape == (4, 3)


@distributed(2)
def test_reset_iter_state_on_a_module_that_is_not_the_root_is_an_error_that_names_it() -> None:
    net: Any = sharded(build())
    net(batch())
    with pytest.raises(RuntimeError, match=r"reset_iter_state.*'blocks\.1'.*not the root"):
        net.blocks[1].reset_iter_state()
    net.reset_iter_state()


@distributed(2)
def test_the_next_forward_warns_of_a_backward_that_raised_and_then_trains_well() -> None:
    reference, net = build(), sharded(build())
    handle = _raise_in_backward(net)
    with pytest.raises(Planned):
        net(batch()).sum().backward()
    handle.remove()
    with pytest.warns(RuntimeWarning, match="reset_iter_state"):
        output = net(batch())
    output.sum().backward()
    reference(batch()).sum().backward()
    grad: Any = net.stem.weight.grad
    assert torch.equal(grad.full_tensor(), reference.stem.weight.grad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(batch())


@pytest.mark.parametrize("save", [pickle.dumps, lambda each: torch.save(each, io.BytesIO())])
@distributed(2)
def test_pickling_a_sharded_module_is_refused_with_what_to_do_instead(
    save: Callable[[Any], object],
) -> None:
    net = sharded(build())
    for each in (net, nn.Sequential(net), {"model": net}):
        with pytest.raises(TypeError, match=r"FSDPNet cannot be pickled.*full_state_dict\(model\)"):
            save(each)
    save(net.state_dict())


@distributed(2)
def test_a_deep_copy_is_refused_with_what_to_do_instead() -> None:
    net = sharded(build())
    with pytest.raises(TypeError, match=r"FSDPNet cannot be deep-copied.*state_dict"):
        copy.deepcopy(net)
    with pytest.raises(TypeError, match="FSDPBlock cannot be deep-copied"):
        copy.deepcopy(nn.ModuleList([net.blocks[0]]))


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


@distributed(2)
def test_a_forward_that_raises_leaves_no_rank_out_of_step() -> None:
    net: Any = sharded(build())
    handle = _raise_in_block(net)
    for _ in range(3):
        with pytest.raises(Planned):
            net(batch())
        net.reset_iter_state()
    handle.remove()
    assert len(set(everyone(net(batch()).sum().item()))) == 1
    assert isinstance(net, FSDPModule)

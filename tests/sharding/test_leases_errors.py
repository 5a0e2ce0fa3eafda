"""Leases when something raises: a forward on every rank, a backward, and ``reset_iter_state()``."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.sharding.base.states import LeaseKind, ShardedState
from support.events.models import batch, make_net
from support.events.recorder import (
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

RESHARD = pytest.mark.parametrize("reshard", [True, False, None])


class UserError(Exception):
    """What the user's own code raises."""


def raise_once(*_: object) -> None:
    """A hook of the user that fails."""
    raise UserError


def good_step(net: nn.Module) -> None:
    """One whole step, from gradients that are None."""
    net.zero_grad()
    net(batch()).square().sum().backward()


def wanted_gradients() -> dict[str, torch.Tensor | None]:
    """The gradients of a good step by the unsharded model."""
    plain = make_net(None)
    good_step(plain)
    return averaged_gradients(plain)


def fail_in_forward(net: Any, where: str) -> None:
    """A forward that raises before, inside or after a block."""
    module = {
        "before": net.blocks[1],
        "inside": net.blocks[1].up,
        "after": net.head,
        "at the end": net,
    }
    if where == "before":
        handle = module[where].register_forward_pre_hook(raise_once)
    else:
        handle = module[where].register_forward_hook(raise_once)
    with pytest.raises(UserError):
        net(batch(seed=7))
    handle.remove()


def hooked_loss(net: Any, *, where: int = 1) -> torch.Tensor:
    """A loss whose backward raises when it comes to block ``where``."""
    handle = net.blocks[where].register_forward_hook(
        lambda module, args, output: output.register_hook(raise_once) and None
    )
    loss = net(batch(seed=7)).square().sum()
    handle.remove()
    return loss


def reset(net: Any, shard: Shard, reshard: bool | None) -> Any:
    """``net`` after its reset; a new one stands in where torch has none (2.11)."""
    if not hasattr(net, "reset_iter_state") and shard is not ours:
        fresh = make_net(shard, reshard_after_forward=reshard)
        good_step(fresh)
        return fresh
    net.reset_iter_state()
    return net


# -- forward --------------------------------------------------------------------------------------


@pytest.mark.cross
@pytest.mark.parametrize("where", ["before", "inside", "after", "at the end"])
@RESHARD
@distributed(2)
def test_a_good_step_follows_a_forward_that_raises_on_every_rank(
    reshard: bool | None, where: str
) -> None:
    net = make_net(ours, reshard_after_forward=reshard)
    good_step(net)
    fail_in_forward(net, where)
    good_step(net)
    assert_close_to(full_gradients(net), wanted_gradients())
    assert_all_returned(net)


@pytest.mark.cross
@RESHARD
@distributed(2, 4)
def test_reset_after_a_forward_that_raises_gives_torchs_next_step(reshard: bool | None) -> None:
    def scenario(shard: Shard) -> tuple[nn.Module, Recorder]:
        net = make_net(shard, reshard_after_forward=reshard)
        good_step(net)
        fail_in_forward(net, "inside")
        net = reset(net, shard, reshard)
        recorder = record(net)
        good_step(net)
        return net, recorder

    mine, _ = compare_with_torch(scenario)
    assert_close_to(mine.gradients, wanted_gradients())


@distributed(2)
def test_reset_after_a_forward_that_raises_in_the_very_first_step() -> None:
    net = make_net(ours)
    fail_in_forward(net, "inside")
    net.reset_iter_state()
    assert_all_returned(net)
    good_step(net)
    assert_close_to(full_gradients(net), wanted_gradients())


@distributed(2)
def test_an_error_with_a_gather_in_flight_leaves_nothing_in_flight() -> None:
    net = make_net(ours)
    net.blocks[0].set_modules_to_forward_prefetch([net.blocks[1], net.blocks[2]])
    handle = net.blocks[0].up.register_forward_hook(raise_once)
    with pytest.raises(UserError):
        net(batch(seed=7))
    handle.remove()
    states = [group_of(block).state for block in net.blocks]
    assert states == [ShardedState.SHARDED] * 3, "the end of the root's forward returns them"
    good_step(net)
    assert_close_to(full_gradients(net), wanted_gradients())


@distributed(2)
def test_a_forward_that_raises_in_a_caught_branch_does_not_disturb_the_rest() -> None:
    def tries(m: Any, x: torch.Tensor) -> torch.Tensor:
        try:
            m.inside.blocks[0](x[:, :3])  # of no fitting shape
        except RuntimeError:
            x = m.inside.blocks[1](x)
        return m.inside.head(m.inside.blocks[0](x))

    def scenario(shard: Shard) -> tuple[nn.Module, Recorder]:
        model = Assembled(tries, inside=make_net(None))
        for block in model.inside.blocks:
            shard(block)
        shard(model)
        recorder = record(model)
        for _ in range(2):
            model.zero_grad()
            model(batch()).sum().backward()
        return model, recorder

    model, _ = scenario(ours)
    assert_all_returned(model)
    plain = Assembled(tries, inside=make_net(None))
    plain(batch()).sum().backward()
    assert_close_to(full_gradients(model), averaged_gradients(plain))


# -- backward -------------------------------------------------------------------------------------


@RESHARD
@distributed(2)
def test_a_backward_that_raises_returns_its_leases_at_the_next_root_forward(
    reshard: bool | None,
) -> None:
    net = make_net(ours, reshard_after_forward=reshard)
    good_step(net)
    loss = hooked_loss(net)
    with pytest.raises(UserError):
        loss.backward()
    block = group_of(net.blocks[2])
    root = group_of(net)
    assert root.leases.out or block.leases.out, "the end-of-backward callback did not run"
    del loss
    with pytest.warns(RuntimeWarning, match=r"last backward did not finish.*reset_iter_state"):
        good_step(net)
    assert_all_returned(net)
    assert_close_to(full_gradients(net), wanted_gradients())


@pytest.mark.cross
@RESHARD
@distributed(2, 4)
def test_reset_after_a_backward_that_raises_gives_torchs_next_step(reshard: bool | None) -> None:
    def scenario(shard: Shard) -> tuple[nn.Module, Recorder]:
        net = make_net(shard, reshard_after_forward=reshard)
        good_step(net)
        loss = hooked_loss(net)
        with pytest.raises(UserError):
            loss.backward()
        del loss
        net = reset(net, shard, reshard)
        if shard is ours:
            assert_all_returned(net)
        recorder = record(net)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # reset said that it was intended
            good_step(net)
        return net, recorder

    mine, _ = compare_with_torch(scenario, gradients=False)
    assert_close_to(mine.gradients, wanted_gradients())


@distributed(2)
def test_a_recomputation_is_no_root_forward_that_would_clean_up() -> None:
    from torch.utils.checkpoint import checkpoint

    net = make_net(ours)
    good_step(net)
    net.zero_grad()
    output = checkpoint(net, batch(), use_reentrant=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output.square().sum().backward()
    assert_close_to(full_gradients(net), wanted_gradients())
    assert_all_returned(net)


@distributed(2)
def test_reset_forgets_gradients_that_were_not_reduced() -> None:
    net = make_net(ours)
    net.set_requires_gradient_sync(False)
    good_step(net)
    with pytest.warns(RuntimeWarning, match="without communication, are dropped"):
        net.reset_iter_state()
    net.set_requires_gradient_sync(True)
    good_step(net)
    assert_close_to(full_gradients(net), wanted_gradients())


@distributed(2)
def test_reset_drops_the_users_lease_and_what_was_gathered_ahead() -> None:
    net = make_net(ours)
    good_step(net)
    net.blocks[0].unshard()
    net.blocks[1].unshard(async_op=True)
    assert group_of(net.blocks[0]).leases.count(LeaseKind.USER) == 1
    net.reset_iter_state()
    assert_all_returned(net)
    good_step(net)
    assert_close_to(full_gradients(net), wanted_gradients())


@distributed(2)
def test_reset_is_for_the_root_only_and_does_nothing_before_the_first_forward() -> None:
    net = make_net(ours)
    net.reset_iter_state()
    good_step(net)
    with pytest.raises(RuntimeError, match=r"'blocks\.1', which is not the root"):
        net.blocks[1].reset_iter_state()
    net.reset_iter_state()
    good_step(net)
    assert_close_to(full_gradients(net), wanted_gradients())

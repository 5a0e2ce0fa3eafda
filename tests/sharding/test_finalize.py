"""Backwards that finish nothing, and ``finalize_backward``, which finishes them once per step.

Right is the unsharded model on the batches of all ranks, and, where the installed torch has the
methods (since 2.15), its own ``fully_shard`` in the same program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp

from fullshard.policies import CanonicalOrder
from fullshard.sharding import fully_shard
from fullshard.sharding.base.states import ShardedState
from support.events.models import DIM, batch, make_net
from support.events.recorder import (
    Recorder,
    Shard,
    assert_all_returned,
    assert_close_to,
    assert_gradients_of,
    averaged_gradients,
    compare_with_torch,
    full_gradients,
    group_of,
    ours,
    record,
    unsharded,
)
from support.modules import Assembled
from support.ranks import cpu_mesh, distributed

TORCH_FINALIZES = hasattr(torch_fsdp.FSDPModule, "finalize_backward")


def _backward(net: nn.Module, seed: int) -> None:
    net(batch(seed=seed)).square().sum().backward()


def _by_hand(net: Any, *, synced: bool = False) -> Any:
    net.set_manual_backward_finalization(True)
    net.set_requires_gradient_sync(synced)
    return net


def _wanted(*seeds: int) -> dict[str, torch.Tensor | None]:
    """The gradients of an unsharded model after a backward on each batch."""
    plain = make_net(None)
    for seed in seeds:
        _backward(plain, seed)
    return averaged_gradients(plain)


def _finish(net: Any, *seeds: int) -> None:
    """Ends the step, with communication: gradients are those of backwards on these batches."""
    net.set_requires_gradient_sync(True)
    net.set_reshard_after_backward(True)
    assert net.finalize_backward() is None
    assert_all_returned(net)
    assert_close_to(full_gradients(net), _wanted(*seeds))


def _left(net: Any) -> list[bool]:
    """Whether each sharded parameter has a gradient."""
    groups = [group_of(each) for each in (net, *net.blocks)]
    return [param.sharded.grad is not None for group in groups for param in group.params]


# -- what a backward leaves -----------------------------------------------------------------------


@pytest.mark.parametrize("reshard", [True, False, None])
@distributed(2, 4, matrix=[4])
def test_gradients_stay_on_the_unsharded_parameters_until_the_step_is_finished(
    reshard: bool | None,
) -> None:
    net = _by_hand(make_net(ours, reshard_after_forward=reshard))
    net.set_reshard_after_backward(False)
    recorder = record(net)
    for seed in range(3):
        _backward(net, seed)
    assert recorder.reductions == []
    assert unsharded(net) == ["root", "0", "1", "2"]
    assert not any(_left(net))
    assert all(param.grad is not None for param in net.parameters())
    _finish(net, 0, 1, 2)
    assert sorted(recorder.reductions) == ["blocks.0", "blocks.1", "blocks.2", "root"]


@distributed(2)
def test_without_synchronisation_each_backward_reshards_what_is_to_be_resharded() -> None:
    """Also the groups whose inputs need no gradient, which no hook of a module reaches."""
    net = _by_hand(make_net(ours, reshard_after_forward=False))
    _backward(net, 0)
    assert unsharded(net) == []
    net.set_requires_gradient_sync(True)
    _backward(net, 1)
    assert unsharded(net) == ["root", "0"]
    _finish(net, 0, 1)


@pytest.mark.parametrize(
    "synced", [(True, True), (True, False), (False, True), (True, False, True)]
)
@distributed(2)
def test_each_synchronised_backward_reduces_and_the_gradients_appear_at_the_end(
    synced: tuple[bool, ...],
) -> None:
    net = _by_hand(make_net(ours))
    recorder = record(net)
    for seed, each in enumerate(synced):
        net.set_requires_gradient_sync(each)
        _backward(net, seed)
    assert recorder.reductions.count("blocks.1") == sum(synced)
    assert not any(_left(net))
    _finish(net, *range(len(synced)))


@distributed(2)
def test_finalizing_without_synchronisation_reshards_and_keeps_the_gradients() -> None:
    net = _by_hand(make_net(ours))
    recorder = record(net)
    _backward(net, 0)
    net.finalize_backward()
    assert_all_returned(net)
    assert recorder.reductions == []
    _backward(net, 1)
    _finish(net, 0, 1)


@distributed(2)
def test_what_is_finalized_stays_unsharded_if_that_is_the_setting() -> None:
    net = _by_hand(make_net(ours), synced=True)
    net.set_reshard_after_backward(False)
    _backward(net, 0)
    net.finalize_backward()
    assert unsharded(net) == ["root", "0", "1", "2"]
    net.reshard()
    for block in net.blocks:
        block.reshard()
    assert_close_to(full_gradients(net), _wanted(0))


@distributed(2)
def test_a_second_call_finds_nothing_to_do() -> None:
    net = _by_hand(make_net(ours), synced=True)
    _backward(net, 0)
    net.finalize_backward()
    recorder = record(net)
    net.finalize_backward()
    assert recorder.reductions == []
    assert_close_to(full_gradients(net), _wanted(0))


@distributed(2)
def test_after_it_is_turned_off_each_backward_finishes_by_itself_again() -> None:
    net = _by_hand(make_net(ours))
    _backward(net, 0)
    net.set_manual_backward_finalization(False)
    net.set_requires_gradient_sync(True)
    _backward(net, 1)
    assert_close_to(full_gradients(net), _wanted(0, 1))
    assert_all_returned(net)


@distributed(2)
def test_gradients_that_are_set_after_a_backward_are_reduced_with_the_others() -> None:
    """As schedules that split backward set them, by hand."""
    net = _by_hand(make_net(ours, reshard_after_forward=False))
    net.set_reshard_after_backward(False)
    for seed in range(2):
        loss = net(batch(seed=seed, requires_grad=True)).square().sum()
        params = list(net.parameters())
        for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            param.grad = grad if param.grad is None else param.grad + grad
    _finish(net, 0, 1)


# -- handles --------------------------------------------------------------------------------------


@distributed(2)
def test_a_handle_may_be_waited_for_after_the_next_backward() -> None:
    """The forward is refused by torch's own."""
    net = _by_hand(make_net(ours), synced=True)
    _backward(net, 0)
    first = net.finalize_backward(async_op=True)
    assert not any(_left(net))
    assert_all_returned(net)
    _backward(net, 1)
    second = net.finalize_backward(async_op=True)
    second.wait()
    first.wait()
    first.wait()
    assert_close_to(full_gradients(net), _wanted(0, 1))


@distributed(2)
def test_before_the_first_forward_there_is_nothing_to_finish() -> None:
    net = make_net(ours)
    assert net.finalize_backward() is None
    net.finalize_backward(async_op=True).wait()
    _backward(net, 0)
    assert_close_to(full_gradients(net), _wanted(0))


# -- meshes and ranks -----------------------------------------------------------------------------


@distributed(4)
def test_replicas_agree_once_per_step() -> None:
    net = make_net(lambda m: fully_shard(m, mesh=cpu_mesh((2, 2), ("replicas", "shards"))))
    _by_hand(net)
    for seed in range(2):
        _backward(net, seed)
    _finish(net, 0, 1)


def _skipping(module: Any, x: torch.Tensor, skips: bool) -> torch.Tensor:
    return module.last(torch.tanh(x if skips else module.first(x)))


def _make_skipping() -> Any:
    torch.manual_seed(0)
    return Assembled(_skipping, first=nn.Linear(DIM, DIM), last=nn.Linear(DIM, DIM))


@pytest.mark.parametrize("synced", [False, True])
@distributed(2)
def test_ranks_that_skip_a_group_in_canonical_order_still_reduce_it(synced: bool) -> None:
    net, plain = _make_skipping(), _make_skipping()
    for part in (net.first, net.last, net):
        ours(part)
    net.set_schedule(CanonicalOrder())
    _by_hand(net, synced=synced)
    for seed in range(2):
        for each in (net, plain):
            each(batch(seed=seed), dist.get_rank() == seed).square().sum().backward()
    net.set_requires_gradient_sync(True)
    net.finalize_backward()
    assert_gradients_of(net, plain)


# -- errors ---------------------------------------------------------------------------------------


@distributed(2)
def test_it_needs_manual_finalization_first() -> None:
    net = make_net(ours)
    _backward(net, 0)
    with pytest.raises(RuntimeError, match=r"set_manual_backward_finalization\(True\) before"):
        net.finalize_backward()


@distributed(2)
def test_only_a_root_takes_it() -> None:
    net = make_net(ours)
    net.blocks[1].set_manual_backward_finalization(True)  # is its own root until the net runs
    with pytest.raises(RuntimeError, match="FSDPBlock under the new root; call it on the root"):
        _backward(net, 0)
    net.blocks[1].set_manual_backward_finalization(False)
    _backward(net, 0)
    assert_close_to(full_gradients(net), _wanted(0))
    for name in ("finalize", "choose"):
        with pytest.raises(RuntimeError, match=r"called on 'blocks\.1', which is not the root"):
            CALLS[name](net.blocks[1])


CALLS: dict[str, Callable[[Any], Any]] = {
    "finalize": lambda net: net.finalize_backward(),
    "choose": lambda net: net.set_manual_backward_finalization(False),
    "keep": lambda net: net.set_keep_unsharded_storage(True),
}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("call", CALLS)
@distributed(2)
def test_in_the_middle_of_a_forward_or_backward_it_raises(call: str, backward: bool) -> None:
    net = _by_hand(make_net(ours), synced=True)
    linear = net.blocks[1].up
    register = linear.register_full_backward_hook if backward else linear.register_forward_hook
    handle = register(lambda *_: CALLS[call](net))
    with pytest.raises(RuntimeError, match=r"in the middle of a forward or backward.*between"):
        _backward(net, 0)
    handle.remove()
    net.reset_iter_state()
    _backward(net, 0)
    _finish(net, 0)


# -- beside torch ---------------------------------------------------------------------------------


@pytest.mark.skipif(not TORCH_FINALIZES, reason="torch's own has no finalize_backward before 2.15")
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("reshard", [True, False])
@distributed(2)
def test_torchs_own_gathers_and_reduces_alike(reshard: bool, async_op: bool) -> None:
    def scenario(shard: Shard) -> tuple[nn.Module, Recorder]:
        net: Any = make_net(shard, reshard_after_forward=False)
        recorder = record(net)
        net.set_manual_backward_finalization(True)
        for seed in range(2):
            net.set_requires_gradient_sync(False)
            net.set_reshard_after_backward(reshard)
            _backward(net, seed)
        net.set_requires_gradient_sync(True)
        net.set_reshard_after_backward(True)
        handle = net.finalize_backward(async_op=async_op)
        if handle is not None:
            handle.wait()
        net.set_manual_backward_finalization(False)
        return net, recorder

    mine, theirs = compare_with_torch(scenario)
    assert sorted(mine.recorder.reductions) == sorted(theirs.recorder.reductions)


@distributed(2)
def test_a_gather_in_flight_that_nobody_used_is_given_up() -> None:
    net = _by_hand(make_net(ours), synced=True)
    net.blocks[0].set_modules_to_backward_prefetch([net.blocks[2]])
    _backward(net, 0)
    assert group_of(net.blocks[2]).state is ShardedState.UNSHARDING
    net.finalize_backward()
    assert_all_returned(net)

"""What is half done is never lost and never stays half done: partial reductions, failed gathers."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp

from fullshard.comm import (
    CollectiveMismatchError,
    DefaultAllGather,
    EventLog,
    ProcessGroupTransport,
    observe,
)
from fullshard.comm.collectives.gather import FullTensors
from fullshard.comm.collectives.reduce import ReducePlan
from fullshard.samehost import SharedMemoryError, reset_shared_memory, shared_memory_statistics
from fullshard.sharding import fully_shard, unsharded
from support.failing import Planned, fail, failing
from support.modules import Assembled
from support.ranks import cpu_mesh, distributed


@distributed(4)
def test_partial_reductions_of_a_backward_that_did_not_wait_reach_the_next_all_reduce() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(3, 4)
    net: Any = fully_shard(copy.deepcopy(plain), mesh=cpu_mesh((2, 2), ("replicate", "shard")))
    batches = torch.randn(2, dist.get_world_size(), 5, 3)
    for micro, last in enumerate((False, True)):
        net.set_requires_all_reduce(last)
        net.set_is_last_backward(last)
        net(batches[micro, dist.get_rank()]).sum().backward()
    for micro in range(2):
        (plain(batches[micro]).sum() / dist.get_world_size()).backward()
    for param, whole in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), whole.grad)


@distributed(2)
def test_a_copy_out_that_raises_on_every_rank_leaves_a_model_that_can_be_reset() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(3, 4)
    net: Any = fully_shard(copy.deepcopy(plain))
    batch = torch.ones(2, 3)
    net.set_custom_all_gather(DefaultAllGather(transport=ProcessGroupTransport()))
    net(batch)
    net.reshard()
    failure = mock.patch.object(FullTensors, "fill", side_effect=RuntimeError("no memory"))
    with failure, pytest.raises(RuntimeError, match="no memory"):
        net(batch)
    net.reset_iter_state()
    torch.testing.assert_close(net(batch), plain(batch))


def _run_stack(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = torch.tanh(layer(x))
    return x


def _stack(shard: Any = fully_shard, **options: Any) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
    net: Any = Assembled(_run_stack, layers=layers)
    plain = copy.deepcopy(net)
    for layer in net.layers:
        shard(layer, **options)
    return shard(net, **options), plain


@distributed(2)
def test_after_a_reset_groups_are_reduced_as_if_the_forward_before_had_not_been() -> None:
    """In the order of their backward, not at its end: no forward before the reset is awaited."""
    seen = []
    for abandoned in (False, True):
        net, _ = _stack()
        held = net(_batch(0, dist.get_rank())) if abandoned else None
        net.reset_iter_state()
        log = EventLog()
        with observe(log):
            _backward(net, 1)
        seen.append([(str(event.kind), event.name) for event in log.events])
        del held
    assert seen[0] == seen[1]
    assert ("reduce", "layers.2") in seen[0]


def _batch(micro: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * micro + rank))


def _backward(net: Any, micro: int, *, leaf: bool = False) -> None:
    net(_batch(micro, dist.get_rank()).requires_grad_(leaf)).sum().backward()


def _fail(net: Any) -> None:
    with failing(net.layers[0], backward=True):
        _backward(net, 99)


def _assert_gradients_of(net: Any, plain: nn.Module, *micros: int, within: str = "") -> None:
    """Compare the gradients of ``net``, which is the module ``within`` the sharded model."""
    world_size = dist.get_world_size()
    for micro in micros:
        for rank in range(world_size):
            (plain(_batch(micro, rank)).sum() / world_size).backward()
    expected = plain.get_submodule(within).parameters()
    for param, whole in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), whole.grad)


SYNC, WAITS = "set_requires_gradient_sync", "set_is_last_backward"
ALL_REDUCE = "set_requires_all_reduce"


@dataclass(frozen=True, kw_only=True)
class Given:
    """A step of which a backward raises after two others, whose gradients wait.

    Attributes:
        off: settings that are off for the two.
        off_too: those that are off for the one that raises, too.
        by_hand: whether backwards are finished by hand, once.
    """

    off: tuple[str, ...]
    off_too: tuple[str, ...] = ()
    by_hand: bool = False


ON_SHARDS = {
    "not synchronised": Given(off=(SYNC,)),
    "not synchronised, as the one that raises": Given(off=(SYNC,), off_too=(SYNC,)),
    "not synchronised, finished by hand": Given(off=(SYNC,), by_hand=True),
}
ON_REPLICAS = {
    "within replicas": Given(off=(ALL_REDUCE,)),
    "within replicas, not waited for": Given(off=(ALL_REDUCE, WAITS), off_too=(ALL_REDUCE, WAITS)),
}


def _assert_dropped(given: Given, **options: Any) -> None:
    net, plain = _stack(**options)
    net.set_manual_backward_finalization(given.by_hand)
    for method in given.off:
        getattr(net, method)(False)
    # what is finished by hand is reduced before only if its input needs a gradient
    _backward(net, 0, leaf=given.by_hand)
    _backward(net, 1, leaf=given.by_hand)
    for method in given.off:
        getattr(net, method)(method not in given.off_too)
    _fail(net)
    with pytest.warns(RuntimeWarning, match=r"without communication, are dropped in .*'layers"):
        net.reset_iter_state()
    for method in given.off:
        getattr(net, method)(True)
    _backward(net, 2)
    if given.by_hand:
        net.finalize_backward()
    _assert_gradients_of(net, plain, 2)
    for each in (net, plain):
        each.zero_grad()
    net.set_manual_backward_finalization(False)
    _backward(net, 3)
    _assert_gradients_of(net, plain, 3)


@pytest.mark.parametrize("name", ON_SHARDS)
@distributed(2)
def test_gradients_that_wait_when_a_backward_raises_are_dropped_loudly(name: str) -> None:
    _assert_dropped(ON_SHARDS[name])


@pytest.mark.parametrize("name", ON_REPLICAS)
@distributed(4)
def test_so_do_partial_results_of_a_hybrid_mesh(name: str) -> None:
    _assert_dropped(ON_REPLICAS[name], mesh=cpu_mesh((2, 2), ("replicate", "shard")))


@distributed(2)
def test_a_backward_that_raises_may_have_added_to_earlier_gradients_as_in_torch() -> None:
    """Of each group all or nothing; see [Note: landing]. What it gave first is dropped."""
    net, plain = _stack()
    for model in (net, _stack(shard=torch_fsdp.fully_shard)[0]):
        _backward(model, 0)
        layers = [nn.ParameterList(layer.parameters()) for layer in model.layers]
        _fail(model)
        for layer, micros in ((0, (0,)), (2, (0, 99))):
            plain.zero_grad()
            _assert_gradients_of(layers[layer], plain, *micros, within=f"layers.{layer}")
    net.reset_iter_state()
    net.zero_grad()
    _fail(net)
    net.reset_iter_state()
    assert all(param.grad is None for param in net.parameters())


@distributed(2)
def test_a_hook_that_raises_at_the_end_of_backward_loses_no_gradient() -> None:
    net, plain = _stack()
    net.layers[2].weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(Planned):
        _backward(net, 0)
    _assert_gradients_of(net, plain, 0)


def _run_recursive(model: Any, x: torch.Tensor, again: int = 0) -> torch.Tensor:
    for layer in model.layers:
        x = torch.tanh(layer(x))
    x = model.head(x)
    return model(x, again - 1) if again else x


def _recursive() -> tuple[Any, nn.Module]:
    """Two layers under a root that has one of its own, and calls itself when told to."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
    net: Any = Assembled(_run_recursive, layers=layers, head=nn.Linear(3, 3))
    plain = copy.deepcopy(net)
    for layer in net.layers:
        fully_shard(layer)
    return fully_shard(net), plain


def _assert_step_of_both(net: Any, plain: nn.Module, again: int) -> None:
    for model in (net, plain):
        model.zero_grad()
    net(_batch(again, dist.get_rank()), again).sum().backward()
    for rank in range(dist.get_world_size()):
        (plain(_batch(again, rank), again).sum() / dist.get_world_size()).backward()
    for param, whole in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), whole.grad)


@pytest.mark.parametrize("where", ["layers.1", "head", ""])
@distributed(2)
def test_after_a_forward_that_was_interrupted_steps_are_right_without_a_word(where: str) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt  # of which torch tells no forward hook

    net, plain = _recursive()
    _assert_step_of_both(net, plain, 0)
    hook = net.get_submodule(where).register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        net(_batch(7, dist.get_rank()))
    hook.remove()
    _assert_step_of_both(net, plain, 0)
    _assert_step_of_both(net, plain, 1)
    assert caught.tb is not None, "frames that ended are alive, as in a notebook"


def _saves(net: Any, plain: nn.Module) -> None:
    saved = net.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(saved[name].full_tensor(), value), name


def _looks(net: Any, plain: nn.Module) -> None:
    with unsharded(net):
        for mine, value in zip(net.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, value)


def _runs_under_a_new_root(net: Any, plain: nn.Module) -> None:
    x = _batch(3, dist.get_rank())
    with torch.no_grad():
        torch.testing.assert_close(fully_shard(nn.Sequential(net))(x), plain(x))


AFTER_AN_ERROR: dict[str, Callable[[Any, nn.Module], None]] = {
    "save a state dict": _saves,
    "look at full parameters": _looks,
    "change a setting": lambda net, plain: net.set_manual_backward_finalization(False),
    "run under a new root": _runs_under_a_new_root,
}


@pytest.mark.parametrize("what", AFTER_AN_ERROR)
@distributed(2)
def test_what_a_program_may_do_after_a_backward_that_raised(what: str) -> None:
    net, plain = _recursive()
    with failing(net.layers[0], backward=True):
        net(_batch(7, dist.get_rank())).sum().backward()
    with pytest.warns(RuntimeWarning, match="did not finish"):
        AFTER_AN_ERROR[what](net, plain)
    _assert_step_of_both(net, plain, 0)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError, ValueError])
@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.cross
@distributed(2)
def test_after_a_reduction_that_raised_the_next_steps_are_right(
    kind: type[BaseException], nth: int
) -> None:
    """The third is the root's, at the end of backward."""
    net, plain = _recursive()
    launch, calls = ReducePlan.launch, itertools.count(1)

    def fail(self: ReducePlan, gradients: Any) -> Any:
        if next(calls) == nth:
            raise kind("no room")
        return launch(self, gradients)

    with mock.patch.object(ReducePlan, "launch", fail), pytest.raises(kind, match="no room"):
        net(_batch(7, dist.get_rank())).sum().backward()
    with pytest.warns(RuntimeWarning, match="did not finish"):
        _assert_step_of_both(net, plain, 0)
    _assert_step_of_both(net, plain, 1)


@distributed(2)
def test_a_forward_that_ended_is_not_kept() -> None:
    net, _ = _recursive()
    output = net(_batch(0, dist.get_rank()))
    kept = weakref.ref(output)
    del output
    assert kept() is None


@distributed(2, fresh=True)
def test_after_a_caught_mismatch_ranks_share_memory_again_and_train_a_new_model() -> None:
    """``fresh``: the test puts the memory of the default process group out of use."""
    world = dist.group.WORLD
    assert world is not None
    net, _ = _stack()
    _backward(net, 0)
    layers = list(net.layers)
    with pytest.raises((CollectiveMismatchError, SharedMemoryError)):
        layers[dist.get_rank()](_batch(0, 0))
        layers[2](_batch(0, 0))
    for model in (net, _stack()[0]):
        with pytest.raises(SharedMemoryError, match=r"reset_shared_memory\(\)"):
            _backward(model, 0)

    reset_shared_memory()
    net, plain = _stack()
    _backward(net, 0)
    _assert_gradients_of(net, plain, 0)
    assert shared_memory_statistics(world).buffers > 0

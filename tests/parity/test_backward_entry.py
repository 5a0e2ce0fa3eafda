"""Backward may enter a sharded model through any tensor: its gradients are right, or it raises.

The losses here are made of tensors that modules keep, of penalties on parameters, or are computed
and run backward inside a forward. Right is the unsharded model on the batches of all ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard.comm import DefaultAllGather, ProcessGroupTransport
from fullshard.insight import debug_mode, set_gather_on_read
from fullshard.sharding import FSDPModule, fully_shard
from support.modules import Assembled
from support.parity.compare import assert_equal, full, gradients_of, rounding
from support.ranks import distributed

WIDTH = 6
BLOCKS = 4


def _run_block(block: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(block.a(x))
    block.kept = torch.tanh(block.b(h))  # a computation that the output has no part in
    block.penalty = block.a.weight.square().sum() + block.b.bias.sum()
    out: torch.Tensor = x + block.b(h)
    return out


def _model() -> Any:
    torch.manual_seed(0)
    pairs = [(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS)]
    blocks = [Assembled(_run_block, a=a, b=b) for a, b in pairs]
    return nn.Sequential(*blocks)


def _kept(model: Any, x: torch.Tensor) -> torch.Tensor:
    model(x)
    return model[2].kept.square().mean()


def _ordinary(model: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(x)
    return out.square().mean()


def _several(model: Any, x: torch.Tensor) -> torch.Tensor:
    model(x)
    return sum(block.kept.square().mean() for block in model)


def _hooked(model: Any, x: torch.Tensor) -> torch.Tensor:
    found: list[torch.Tensor] = []
    handles = [block.b.register_forward_hook(lambda m, i, o: found.append(o)) for block in model]
    model(x)
    for handle in handles:
        handle.remove()
    return torch.stack([each.square().mean() for each in found[::2]]).sum()


def _penalty(model: Any, x: torch.Tensor) -> torch.Tensor:
    model(x)
    return model[1].penalty + model[3].penalty


def _beside_output(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean() + model[1].kept.square().mean()


def _checkpointed(model: Any, x: torch.Tensor) -> torch.Tensor:
    kept = []
    for block in model:
        x = checkpoint(block, x, use_reentrant=False)
        kept.append(block.kept)
    return sum(each.square().mean() for each in kept)


LOSSES = {
    "kept": _kept,
    "several": _several,
    "hooked": _hooked,
    "penalty": _penalty,
    "beside the output": _beside_output,
}


@dataclass(frozen=True)
class Way:
    """How the model is sharded, and its parameters gathered."""

    reshards: bool = True
    reads: bool = False
    private: bool = False

    def shard(self, model: Any) -> Any:
        """Each block is a group of its own."""
        for block in model:
            fully_shard(block, reshard_after_forward=self.reshards)
        fully_shard(model, reshard_after_forward=self.reshards)
        set_gather_on_read(model, self.reads)
        for module in model.modules() if self.private else ():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(DefaultAllGather(transport=ProcessGroupTransport()))
        return model


WAYS = {
    "read": Way(reads=True),
    "read, private memory": Way(reads=True, private=True),
    "kept unsharded": Way(reshards=False),
    "kept unsharded, private memory": Way(reshards=False, private=True),
}


def _batch() -> torch.Tensor:
    return torch.randn(4 * dist.get_world_size(), WIDTH, generator=torch.Generator().manual_seed(1))


def _mine(whole: torch.Tensor) -> torch.Tensor:
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def _assert_steps(
    model: Any, reference: Any, loss: Callable[[Any, torch.Tensor], torch.Tensor]
) -> None:
    """Two steps by `loss`, then an ordinary one, give the gradients of the reference."""
    world_size = dist.get_world_size()
    losses = [loss, loss, _ordinary]
    for step, each in enumerate(losses):
        each(model, _mine(_batch()) + step).backward()
        for rows in _batch().chunk(world_size):
            (each(reference, rows + step) / world_size).backward()
        got, want = gradients_of(model), gradients_of(reference)
        assert_equal(got, want, rounding(world_size), f"gradients of step {step}")
        model.zero_grad()
        reference.zero_grad()


@pytest.mark.cross
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss", LOSSES)
@distributed(2, 1)
def test_a_loss_on_a_tensor_that_no_module_returned_has_the_right_gradients(
    loss: str, way: str
) -> None:
    reference = _model()
    _assert_steps(WAYS[way].shard(copy.deepcopy(reference)), reference, LOSSES[loss])


@pytest.mark.parametrize("way", [Way(), Way(reads=True)], ids=["default", "read"])
@distributed(2)
def test_checkpointing_recomputes_what_backward_enters_from_inside(way: Way) -> None:
    reference = _model()
    _assert_steps(way.shard(copy.deepcopy(reference)), reference, _checkpointed)


@pytest.mark.parametrize("private", [False, True], ids=["shared", "private"])
@pytest.mark.parametrize("loss", ["kept", "several", "hooked", "penalty"])
@distributed(2)
def test_by_default_such_a_backward_raises_and_training_goes_on(loss: str, private: bool) -> None:
    reference = _model()
    model = Way(private=private).shard(copy.deepcopy(reference))
    with pytest.raises(RuntimeError, match="is at version 100000000"):
        LOSSES[loss](model, _mine(_batch())).backward()
    model.reset_iter_state()
    _assert_steps(model, reference, _beside_output)


@distributed(2)
def test_in_debug_mode_the_error_names_parameter_module_and_cure() -> None:
    model = Way().shard(_model())
    with (
        debug_mode(),
        pytest.raises(RuntimeError, match=r"reads 2\.b\.weight, .*'2'.*set_gather_on_read"),
    ):
        _kept(model, _mine(_batch())).backward()


@distributed(2)
def test_in_debug_mode_a_change_in_place_of_a_saved_tensor_is_still_an_error() -> None:
    model = Way().shard(_model())
    with debug_mode(), pytest.raises(RuntimeError, match="changed in place"):
        out = model(_mine(_batch()))
        model[1].kept.mul_(2)
        (out.sum() + model[1].kept.sum()).backward()


@pytest.mark.parametrize("way", [Way(reads=True), Way(reshards=False)], ids=["read", "kept"])
@distributed(2)
def test_the_inputs_gradient_of_a_frozen_network_is_right(way: Way) -> None:
    reference = _model().requires_grad_(False)
    model = way.shard(copy.deepcopy(reference))
    mine, whole = (each.clone().requires_grad_() for each in (_mine(_batch()), _batch()))
    _kept(model, mine).backward()
    _kept(reference, whole).backward()
    assert mine.grad is not None and whole.grad is not None
    torch.testing.assert_close(mine.grad, _mine(whole.grad) * dist.get_world_size())


@distributed(2)
def test_a_frozen_network_that_is_read_while_sharded_raises() -> None:
    model = Way().shard(_model().requires_grad_(False))
    with pytest.raises(RuntimeError, match="is at version 100000000"):
        _kept(model, _mine(_batch()).requires_grad_()).backward()


# -- no output of a sharded module has a part in the loss -----------------------------------------


def _keeps_loss(module: Any, x: torch.Tensor) -> float:
    module.loss = module.head(torch.tanh(module.body(x))).square().mean()
    return float(module.loss.detach())


def _calls_backward(module: Any, x: torch.Tensor) -> float:
    loss = module.head(torch.tanh(module.body(x))).square().mean()
    loss.backward()
    return float(loss.detach())


def _head(run: Callable[..., float]) -> Any:
    torch.manual_seed(0)
    return Assembled(run, body=nn.Linear(WIDTH, WIDTH), head=nn.Linear(WIDTH, 3))


@pytest.mark.cross
@pytest.mark.parametrize("children", [False, True], ids=["one group", "sharded child"])
@pytest.mark.parametrize("run", [_keeps_loss, _calls_backward], ids=["kept loss", "inside"])
@distributed(2, 1)
def test_a_root_that_returns_no_tensor_reduces_its_gradients_as_usual(
    run: Callable[..., float], children: bool
) -> None:
    reference = _head(run)
    model = copy.deepcopy(reference)
    if children:
        fully_shard(model.body)
    fully_shard(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, reference)]
    for step in range(3):
        norms = []
        for each, rows in ((model, _mine(_batch())), (reference, _batch())):
            each(rows + step)
            if run is _keeps_loss:
                each.loss.backward()
            norm = nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            norms.append(full(norm))
        torch.testing.assert_close(*norms)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for got, want in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(got), want.detach())


@distributed(2)
def test_gradients_accumulate_over_backwards_that_nobody_announced() -> None:
    reference = _head(_keeps_loss)
    model = fully_shard(copy.deepcopy(reference))
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        for each, rows in ((model, _mine(_batch())), (reference, _batch())):
            each(rows + step)
            each.loss.backward()
    assert_equal(gradients_of(model), gradients_of(reference), rounding(2), "gradients")

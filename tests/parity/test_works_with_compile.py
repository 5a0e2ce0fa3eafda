"""Blocks that are compiled, before or after sharding, train as uncompiled ones and as torch's own.

What the compiler captures is what it captures of torch's own ``fully_shard``: the same number of
graphs with the same number of calls, so hooks stay outside and nothing is compiled twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend

from fullshard.sharding import fully_shard
from support.modules import Residual, in_turn
from support.parity.compare import EXACT, assert_equal, gradients_of, parameters_of, rounding
from support.parity.engines import OURS, TORCH, Engine
from support.parity.reference import my_rows
from support.products import few
from support.ranks import cpu_mesh, distributed

# torch warns of outputs that are views, and of what its compiler does to inputs of a graph
pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def _build() -> Any:
    """Blocks and a head."""
    torch.manual_seed(41)
    blocks = nn.Sequential(*(Residual(6, 9) for _ in range(2)))
    return in_turn(blocks=blocks, head=nn.Linear(6, 3)).double()


@dataclass(frozen=True)
class Way:
    """How a model is compiled: each block or the whole, before it is sharded or after, in place."""

    each: bool = True
    before: bool = False
    in_place: bool = True

    def compile(self, module: Any, backend: Any) -> Any:
        """Return ``module`` compiled, which wraps it if it is not done in place."""
        if not self.in_place:
            return torch.compile(module, backend=backend)
        module.compile(backend=backend)
        return module

    def apply(self, model: Any, shard: Callable[[nn.Module], object], backend: Any) -> Any:
        """Compile and shard ``model``; return what to call."""
        for index, block in enumerate(model.blocks if self.each else ()):
            if not self.before:
                shard(block)
            model.blocks[index] = compiled = self.compile(block, backend)
            if self.before:
                shard(compiled)
        if self.each:
            shard(model)
            return model
        for part in (*model.blocks, model):
            shard(part)
        return self.compile(model, backend)


WAYS = {
    "each-before-in-place": Way(before=True),
    "each-before-wrapped": Way(before=True, in_place=False),
    "each-after-in-place": Way(),
    "each-after-wrapped": Way(in_place=False),
    "whole-in-place": Way(each=False),
    "whole-wrapped": Way(each=False, in_place=False),
}


def _train(
    way: str, engine: Engine, backend: str, **options: Any
) -> tuple[Any, list[torch.Tensor], CompileCounterWithBackend]:
    torch.compiler.reset()
    model, counter = _build(), CompileCounterWithBackend(backend)
    shard = functools.partial(engine.fully_shard, mesh=cpu_mesh(), **options)
    return model, _steps(model, WAYS[way].apply(model, shard, counter), my_rows()), counter


def _steps(model: Any, running: Any, rows: slice) -> list[torch.Tensor]:
    """The losses of three backwards, the last of which leaves its gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(3):
        loss = running(_batch(step)[rows]).square().mean()
        loss.backward()
        losses.append(loss.detach())
        if step < 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def _batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(50 + step)
    return torch.randn(8, 6, generator=generator, dtype=torch.float64)


def _unsharded() -> nn.Module:
    model: nn.Module = _build()
    _steps(model, model, slice(None))
    return model


def _named(tensors: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("way", few(WAYS, "each-before-in-place", "whole-in-place"))
@distributed(2)
def test_a_compiled_model_trains_as_the_unsharded_one_and_as_torchs(
    way: str, backend: str, world_size: int
) -> None:
    model, losses, counter = _train(way, OURS, backend)
    _, expected, theirs = _train(way, TORCH, backend)
    assert all(torch.equal(*pair) for pair in zip(losses, expected, strict=True))
    assert (counter.frame_count, counter.op_count) == (theirs.frame_count, theirs.op_count)
    whole, allowed = _unsharded(), rounding(world_size, steps=3)
    assert_equal(_named(gradients_of(model)), gradients_of(whole), allowed, "gradients")
    assert_equal(_named(parameters_of(model)), parameters_of(whole), allowed, "parameters")


@pytest.mark.parametrize("reshard", few([False, None], False))
@distributed(2)
def test_what_is_resharded_does_not_matter_to_a_compiled_block(
    reshard: bool | None, world_size: int
) -> None:
    way = "each-after-in-place"
    model, _, counter = _train(way, OURS, "aot_eager", reshard_after_forward=reshard)
    assert counter.frame_count == 2  # each block's forward, never again
    whole = _unsharded()
    assert_equal(
        gradients_of(model), gradients_of(whole), rounding(world_size, steps=3), "gradients"
    )


@distributed(2)
def test_mixed_precision_inside_a_compiled_block_equals_torchs() -> None:
    gradients = []
    for engine in (OURS, TORCH):
        policy = engine.mixed(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        torch.compiler.reset()
        model = _build().float()
        shard = functools.partial(engine.fully_shard, mesh=cpu_mesh(), mp_policy=policy)
        running = Way().apply(model, shard, "aot_eager")
        running(_batch(0)[my_rows()].float()).float().square().mean().backward()
        gradients.append(gradients_of(model))
    assert_equal(gradients[0], gradients[1], EXACT, "gradients")


@distributed(2)
def test_compiled_autograd_is_refused_and_training_goes_on_without_it() -> None:
    net: Any = _build()
    for part in (*net.blocks, net):
        fully_shard(part)
    x = torch.randn(2, 6, dtype=torch.float64)
    with (
        pytest.raises(RuntimeError, match="compiled autograd is on"),
        compiled_autograd._enable(lambda graph: graph),
    ):
        net(x).square().sum().backward()
    net.reset_iter_state()
    net.zero_grad()
    net(x).square().sum().backward()
    assert all(param.grad is not None for param in net.parameters())

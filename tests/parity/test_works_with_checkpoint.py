"""torch's two checkpoint wrappers, the composable one and the module, around and inside units.

``test_checkpointing`` has the function in all its variants; here are the forms that change a module
before or after it is sharded. Right is the unsharded model without checkpoints, and torch's own
``fully_shard`` under the same wrappers, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from support.parity.compare import EXACT, assert_equal, gradients_of, parameters_of, rounding
from support.parity.engines import OURS, TORCH, Engine
from support.parity.models import CASES, Block, TinyTransformer, build
from support.parity.reference import adamw, my_rows, rows_of
from support.ranks import cpu_mesh, distributed

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]

CASE, DTYPE = CASES["transformer"], torch.float64
_Shard = Callable[[nn.Module], Any]


def _composable_inside(model: TinyTransformer, shard: _Shard) -> None:
    for block in model.blocks:
        composable_checkpoint(block)
        shard(block)


def _composable_outside(model: TinyTransformer, shard: _Shard) -> None:
    for block in model.blocks:
        shard(block)
        composable_checkpoint(block)


def _composable_in_nested_units(model: TinyTransformer, shard: _Shard) -> None:
    for block in model.blocks:
        assert isinstance(block, Block)
        composable_checkpoint(shard(block.up))
        shard(block.down)
        composable_checkpoint(block)
        shard(block)


def _wrapper_inside(model: TinyTransformer, shard: _Shard) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = shard(checkpoint_wrapper(block))


def _wrapper_outside(model: TinyTransformer, shard: _Shard) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(shard(block))


def _reentrant_wrapper_outside(model: TinyTransformer, shard: _Shard) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(
            shard(block), checkpoint_impl=CheckpointImpl.REENTRANT
        )


def _wrapper_at_two_levels(model: TinyTransformer, shard: _Shard) -> None:
    for index, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        block.up = checkpoint_wrapper(shard(block.up))  # type: ignore[assignment]  # a module like it
        model.blocks[index] = checkpoint_wrapper(shard(block))


def _applied_to_all(model: TinyTransformer, shard: _Shard) -> None:
    for block in model.blocks:
        shard(block)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))


WAYS: dict[str, Callable[[TinyTransformer, _Shard], None]] = {
    "composable-inside": _composable_inside,
    "composable-outside": _composable_outside,
    "composable-nested-units": _composable_in_nested_units,
    "wrapper-inside": _wrapper_inside,
    "wrapper-outside": _wrapper_outside,
    "reentrant-wrapper-outside": _reentrant_wrapper_outside,
    "wrapper-at-two-levels": _wrapper_at_two_levels,
    "applied-to-all": _applied_to_all,
}


def _sharded(way: str, engine: Engine, reshard: bool | None) -> nn.Module:
    model = build(CASE, DTYPE)
    assert isinstance(model, TinyTransformer)

    def shard(module: nn.Module) -> Any:
        return engine.fully_shard(module, mesh=cpu_mesh(), reshard_after_forward=reshard)

    WAYS[way](model, shard)
    shard(model)
    return model


def _backward(model: nn.Module, step: int, rows: slice) -> None:
    inputs, targets = rows_of(CASE.batch(step, DTYPE), rows)
    CASE.loss(model(inputs), targets).backward()


def _named(tensors: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    return {name.replace("_checkpoint_wrapped_module.", ""): t for name, t in tensors.items()}


@pytest.mark.parametrize("way", WAYS)
@distributed(2)
def test_steps_equal_those_without_checkpoints_and_without_sharding(
    way: str, world_size: int
) -> None:
    for reshard in (None, False):
        model, whole = _sharded(way, OURS, reshard), build(CASE, DTYPE)
        optimizers = adamw(model), adamw(whole)
        for step in range(2):
            _backward(model, step, my_rows())
            _backward(whole, step, slice(None))
            allowed = rounding(world_size, steps=step + 1)
            found = _named(gradients_of(model))
            assert_equal(found, gradients_of(whole), allowed, f"gradients at step {step}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        allowed = rounding(world_size, steps=3)
        assert_equal(
            _named(parameters_of(model)), parameters_of(whole), allowed, f"reshard={reshard}"
        )


@pytest.mark.parametrize("way", WAYS)
@distributed(2)
def test_gradients_equal_those_under_torchs_own(way: str) -> None:
    gradients = []
    for engine in (OURS, TORCH):
        model = _sharded(way, engine, None)
        for step in range(2):
            _backward(model, step, my_rows())
        gradients.append(gradients_of(model))
    assert_equal(gradients[0], gradients[1], EXACT, way)


@pytest.mark.parametrize("way", ["composable-outside", "wrapper-outside", "wrapper-at-two-levels"])
@distributed(2)
def test_two_forwards_before_their_backwards(way: str, world_size: int) -> None:
    model, whole = _sharded(way, OURS, None), build(CASE, DTYPE)
    losses = []
    for step in range(2):
        inputs, targets = rows_of(CASE.batch(step, DTYPE), my_rows())
        losses.append(CASE.loss(model(inputs), targets))
        _backward(whole, step, slice(None))
    for loss in losses:
        loss.backward()
    allowed = rounding(world_size, steps=2)
    assert_equal(_named(gradients_of(model)), gradients_of(whole), allowed, "gradients")

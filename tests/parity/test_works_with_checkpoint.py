"""Activation checkpointing in all its forms, around and inside units, leaves gradients as they are.

The forms are the function, which a forward calls, and torch's two wrappers, the composable one and
the module, which change a module before or after it is sharded. Right is the unsharded model
without checkpoints, and torch's own ``fully_shard`` under the same wrappers, bit for bit.
"""

from __future__ import annotations

import functools
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
from torch.utils.checkpoint import checkpoint

from support.parity.compare import EXACT, assert_equal, gradients_of
from support.parity.engines import OURS, TORCH, Engine
from support.parity.models import CASES, Block, build
from support.parity.reference import Pair, my_rows, rows_of
from support.products import few
from support.ranks import cpu_mesh, distributed

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
    # Inside a reentrant checkpoint the first forward has no gradients.
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]

DTYPE = torch.float64
_Shard = Callable[[nn.Module], Any]


def _function(inner: bool | None, outer: bool | None) -> Callable[[Any, _Shard], None]:
    """Checkpoints inside the blocks, around them, or both; True is the reentrant variant."""

    def way(model: Any, shard: _Shard) -> None:
        if outer is not None:
            model.outer = functools.partial(checkpoint, use_reentrant=outer)
        for block in model.blocks:
            if inner is not None:
                block.inner = functools.partial(checkpoint, use_reentrant=inner)
            shard(block)

    return way


def _composable(model: Any, shard: _Shard, *, inside: bool) -> None:
    for block in model.blocks:
        for apply in (composable_checkpoint, shard) if inside else (shard, composable_checkpoint):
            apply(block)


def _composable_in_nested_units(model: Any, shard: _Shard) -> None:
    for block in model.blocks:
        composable_checkpoint(shard(block.up))
        shard(block.down)
        composable_checkpoint(block)
        shard(block)


def _wrapper_inside(model: Any, shard: _Shard) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = shard(checkpoint_wrapper(block))


def _wrapper_outside(model: Any, shard: _Shard, **options: Any) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(shard(block), **options)


def _wrapper_at_two_levels(model: Any, shard: _Shard) -> None:
    for index, block in enumerate(model.blocks):
        block.up = checkpoint_wrapper(shard(block.up))
        model.blocks[index] = checkpoint_wrapper(shard(block))


def _applied_to_all(model: Any, shard: _Shard) -> None:
    for block in model.blocks:
        shard(block)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))


WAYS: dict[str, Callable[[Any, _Shard], None]] = {
    "inside": _function(False, None),
    "inside-reentrant": _function(True, None),
    "outside": _function(None, False),
    "outside-reentrant": _function(None, True),
    "nested": _function(False, False),
    "nested-reentrant": _function(True, True),
    "reentrant-inside-the-other": _function(True, False),
    "the-other-inside-reentrant": _function(False, True),
    "composable-inside": functools.partial(_composable, inside=True),
    "composable-outside": functools.partial(_composable, inside=False),
    "composable-nested-units": _composable_in_nested_units,
    "wrapper-inside": _wrapper_inside,
    "wrapper-outside": _wrapper_outside,
    "reentrant-wrapper-outside": functools.partial(
        _wrapper_outside, checkpoint_impl=CheckpointImpl.REENTRANT
    ),
    "wrapper-at-two-levels": _wrapper_at_two_levels,
    "applied-to-all": _applied_to_all,
}


def _sharded(
    way: str, engine: Engine = OURS, reshard: bool | None = None, name: str = "transformer"
) -> Any:
    model: Any = build(CASES[name], DTYPE)

    def shard(module: nn.Module) -> Any:
        return engine.fully_shard(module, mesh=cpu_mesh(), reshard_after_forward=reshard)

    if name == "tied-across-groups":
        shard(model.embedding)
    WAYS[way](model, shard)
    shard(model)
    return model


def _pair(way: str, **options: Any) -> Pair:
    return Pair(CASES[options.get("name", "transformer")], _sharded(way, **options), DTYPE)


# One of each kind of checkpoint; torch's and ours are compared for some more.
_FIRST = ("inside", "outside-reentrant", "composable-nested-units", "wrapper-at-two-levels")


@pytest.mark.cross
@pytest.mark.parametrize("way", few(WAYS, *_FIRST))
@pytest.mark.parametrize("name", ["transformer", "tied-across-groups"])
@distributed(2, 4, matrix=[4])
def test_steps_equal_those_without_checkpoints_and_without_sharding(name: str, way: str) -> None:
    for reshard in (None, True, False):
        pair = _pair(way, reshard=reshard, name=name)
        for step in range(2):
            pair.backward(step, step + 1)
            pair.check(what=f"reshard={reshard}, step {step}")
            pair.step()
        pair.check(what=f"reshard={reshard}")


@pytest.mark.parametrize("way", few(WAYS, *_FIRST, "applied-to-all", "reentrant-inside-the-other"))
@distributed(2)
def test_gradients_equal_those_under_torchs_own(way: str) -> None:
    case, gradients = CASES["transformer"], []
    for engine in (OURS, TORCH):
        model = _sharded(way, engine)
        for step in range(2):
            inputs, targets = rows_of(case.batch(step, DTYPE), my_rows())
            case.loss(model(inputs), targets).backward()
        gradients.append(gradients_of(model))
    assert_equal(gradients[0], gradients[1], EXACT, way)


@pytest.mark.parametrize(
    "way",
    [
        "outside",
        "outside-reentrant",
        "composable-outside",
        "wrapper-outside",
        "wrapper-at-two-levels",
    ],
)
@distributed(2)
def test_several_forwards_before_their_backwards(way: str) -> None:
    pair = _pair(way)
    losses = [pair.losses(step) for step in range(3)]
    for index in (1, 2, 0):
        for loss in losses[index]:
            loss.backward()
    pair.check(3)


@pytest.mark.parametrize("reentrant", [False, True])
@distributed(2)
def test_one_block_called_twice_under_a_checkpoint(reentrant: bool) -> None:
    pair = _pair("outside")

    def again(block: nn.Module, x: torch.Tensor) -> Any:
        once = checkpoint(block, x, use_reentrant=reentrant)
        return checkpoint(block, once, use_reentrant=reentrant)

    pair.model.outer, pair.whole.outer = again, lambda block, x: block(block(x))  # type: ignore[assignment]
    for step in range(2):
        pair.backward(step)
        pair.check()

"""Activation checkpointing, inside or outside of what is sharded, leaves gradients as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.parity.compare import assert_equal, gradients_of, parameters_of, rounding
from support.parity.engines import shard
from support.parity.models import CASES, Block, TinyTransformer, build
from support.parity.reference import adamw, my_rows, rows_of
from support.ranks import distributed

# Inside a reentrant checkpoint the first forward has no gradients, which the inner one remarks on.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


def _wrap(reentrant: bool) -> Callable[..., torch.Tensor]:
    return functools.partial(checkpoint, use_reentrant=reentrant)


def _set(model: nn.Module, inner: bool | None, outer: bool | None) -> None:
    """Checkpoints inside the blocks, around them, or both; True is the reentrant variant."""
    assert isinstance(model, TinyTransformer)
    if outer is not None:
        model.outer = _wrap(outer)
    for block in model.blocks:
        assert isinstance(block, Block)
        if inner is not None:
            block.inner = _wrap(inner)


WHERE = {
    "inside": (False, None),
    "inside-reentrant": (True, None),
    "outside": (None, False),
    "outside-reentrant": (None, True),
    "nested": (False, False),
    "nested-reentrant": (True, True),
    "reentrant-inside-the-other": (True, False),
    "the-other-inside-reentrant": (False, True),
}


@pytest.mark.cross
@pytest.mark.parametrize(
    ("name", "reshards"),
    [
        ("transformer", (True, False)),
        ("transformer-nested", (True, None)),
        ("tied-across-groups", (None,)),
    ],
)
@pytest.mark.parametrize("where", WHERE)
@distributed(2)
def test_checkpointed_blocks_have_the_gradients_of_the_whole_batch(
    where: str, name: str, reshards: tuple[bool | None, ...], world_size: int
) -> None:
    case, dtype = CASES[name], torch.float64
    for reshard in reshards:
        model, whole = shard(case, dtype=dtype, reshard_after_forward=reshard), build(case, dtype)
        _set(model, *WHERE[where])
        optimizers = adamw(model), adamw(whole)
        for step in range(2):
            for micro in range(2):
                inputs, targets = rows_of(case.batch(step + micro, dtype), my_rows())
                case.loss(model(inputs), targets).backward()
                inputs, targets = case.batch(step + micro, dtype)
                case.loss(whole(inputs), targets).backward()
            allowed = rounding(world_size, steps=2 * (step + 1))
            what = f"gradients, step {step}, reshard_after_forward={reshard}"
            assert_equal(gradients_of(model), gradients_of(whole), allowed, what)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_equal(parameters_of(model), parameters_of(whole), allowed, "parameters")


@pytest.mark.parametrize("where", WHERE)
@distributed(4)
def test_four_ranks_have_the_gradients_of_the_whole_batch(where: str, world_size: int) -> None:
    case, dtype = CASES["transformer"], torch.float64
    model, whole = shard(case, dtype=dtype), build(case, dtype)
    _set(model, *WHERE[where])
    inputs, targets = rows_of(case.batch(0, dtype), my_rows())
    case.loss(model(inputs), targets).backward()
    inputs, targets = case.batch(0, dtype)
    case.loss(whole(inputs), targets).backward()
    assert_equal(gradients_of(model), gradients_of(whole), rounding(world_size), "gradients")


@pytest.mark.parametrize("reshard", [True, False])
@distributed(2)
def test_a_checkpoint_around_the_whole_model_recomputes_the_root(
    reshard: bool, world_size: int
) -> None:
    case, dtype = CASES["transformer"], torch.float64
    model, whole = shard(case, dtype=dtype, reshard_after_forward=reshard), build(case, dtype)
    for step in range(2):
        inputs, targets = rows_of(case.batch(step, dtype), my_rows())
        case.loss(checkpoint(model, inputs, use_reentrant=False), targets).backward()
        inputs, targets = case.batch(step, dtype)
        case.loss(whole(inputs), targets).backward()
        allowed = rounding(world_size, steps=step + 1)
        assert_equal(gradients_of(model), gradients_of(whole), allowed, f"gradients {step}")


@pytest.mark.parametrize("reentrant", [False, True])
@distributed(2)
def test_several_checkpointed_forwards_before_several_backwards(
    reentrant: bool, world_size: int
) -> None:
    case, dtype = CASES["transformer"], torch.float64
    model, whole = shard(case, dtype=dtype), build(case, dtype)
    _set(model, None, reentrant)
    losses = []
    for step in range(3):
        inputs, targets = rows_of(case.batch(step, dtype), my_rows())
        losses.append(case.loss(model(inputs), targets))
        inputs, targets = case.batch(step, dtype)
        case.loss(whole(inputs), targets).backward()
    for loss in (losses[1], losses[2], losses[0]):
        loss.backward()
    allowed = rounding(world_size, steps=3)
    assert_equal(gradients_of(model), gradients_of(whole), allowed, "gradients")


@pytest.mark.parametrize("reentrant", [False, True])
@distributed(2)
def test_one_block_called_twice_under_a_checkpoint(reentrant: bool, world_size: int) -> None:
    case, dtype = CASES["transformer"], torch.float64
    model, whole = shard(case, dtype=dtype), build(case, dtype)
    run = _wrap(reentrant)

    def again(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return run(block, run(block, x))

    def twice(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = block(block(x))
        return output

    assert isinstance(model, TinyTransformer)
    assert isinstance(whole, TinyTransformer)
    model.outer, whole.outer = again, twice
    for step in range(2):
        inputs, targets = rows_of(case.batch(step, dtype), my_rows())
        case.loss(model(inputs), targets).backward()
        inputs, targets = case.batch(step, dtype)
        case.loss(whole(inputs), targets).backward()
        allowed = rounding(world_size, steps=step + 1)
        assert_equal(gradients_of(model), gradients_of(whole), allowed, f"gradients {step}")

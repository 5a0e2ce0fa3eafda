"""``torch.autocast``: a region around several forwards and backwards is as one for each forward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)

from fullshard.sharding import fully_shard
from support.modules import Assembled
from support.parity.compare import EXACT, assert_equal, gradients_of, parameters_of
from support.ranks import distributed
from support.surface.errors import says
from support.surface.model import WIDTH, Block, Net, batch, build, sharded

Region = Callable[[], AbstractContextManager[Any]]
Step = Callable[[], object]


def _autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def _loss(model: nn.Module, step: int, inner: Region) -> torch.Tensor:
    inputs = batch(step).requires_grad_()  # reentrant checkpointing asks for it
    with inner():
        loss: torch.Tensor = model(inputs).float().square().mean()
    return loss


def _accumulate(model: nn.Module, inner: Region, step: Step) -> None:
    for number in range(3):
        _loss(model, number, inner).backward()
    step()


def _step_each_time(model: nn.Module, inner: Region, step: Step) -> None:
    for number in range(3):
        model.zero_grad()
        _loss(model, number, inner).backward()
        step()


def _forwards_first(model: nn.Module, inner: Region, step: Step) -> None:
    for loss in [_loss(model, number, inner) for number in range(3)]:
        loss.backward()
    step()


def _evaluate_before(model: nn.Module, inner: Region, step: Step) -> None:
    with torch.no_grad():
        _loss(model, 9, inner)
    _accumulate(model, inner, step)


def _ran(
    model: nn.Module, program: Callable[[nn.Module, Region, Step], None], *, together: bool
) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with _autocast() if together else nullcontext():
        program(model, nullcontext if together else _autocast, optimizer.step)
    return model


def _model(checkpointing: CheckpointImpl | None) -> Net:
    net = build()
    for number, block in enumerate(net.blocks):
        if checkpointing is not None:
            net.blocks[number] = checkpoint_wrapper(block, checkpoint_impl=checkpointing)
    return net


# of reentrant checkpoints in a forward without gradients
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.cross
@pytest.mark.parametrize(
    "program", [_accumulate, _step_each_time, _forwards_first, _evaluate_before]
)
@pytest.mark.parametrize(
    "checkpointing", [None, CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT]
)
@pytest.mark.parametrize("reshard", [True, False])
@distributed(2)
def test_one_region_around_all_is_the_unsharded_model_with_one_for_each_forward(
    program: Any, checkpointing: CheckpointImpl | None, reshard: bool
) -> None:
    net = sharded(_model(checkpointing), reshard_after_forward=reshard)
    model = _ran(net, program, together=True)
    whole = _ran(_model(checkpointing), program, together=False)
    assert_equal(gradients_of(model), gradients_of(whole), EXACT, "gradients")
    assert_equal(parameters_of(model), parameters_of(whole), EXACT, "parameters")


@distributed(2)
def test_a_block_may_run_without_gradients_before_it_runs_with_them_in_the_same_forward() -> None:
    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = model.stem(x)
        with torch.no_grad():
            target = model.block(x)
        difference: torch.Tensor = model.block(x) - target.float() + 1
        return difference

    def made() -> Assembled:
        torch.manual_seed(0)
        return Assembled(run, stem=nn.Linear(WIDTH, WIDTH), block=Block())

    model, whole = made(), made()
    fully_shard(model.block)
    fully_shard(model)
    for each in (model, whole):
        for step in range(2):
            _loss(each, step, _autocast).backward()
    assert_equal(gradients_of(model), gradients_of(whole), EXACT, "gradients")


@pytest.mark.parametrize("cure", [None, {"cache_enabled": False}])
@distributed(2)
def test_a_cached_cast_of_an_earlier_backward_in_one_forward_is_refused_with_its_cure(
    cure: dict[str, bool] | None,
) -> None:
    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = model.stem(x).detach().requires_grad_()
        model.layer(x).float().square().mean().backward()
        output: torch.Tensor = model.layer(x)
        return output

    def made() -> Assembled:
        torch.manual_seed(0)
        return Assembled(run, stem=nn.Linear(WIDTH, WIDTH), layer=nn.Linear(WIDTH, WIDTH))

    def region() -> AbstractContextManager[Any]:
        return torch.autocast("cpu", dtype=torch.bfloat16, **(cure or {}))

    model, whole = made(), made()
    fully_shard(model.layer)
    fully_shard(model)
    _loss(whole, 0, region).backward()
    loss = _loss(model, 0, region)
    if cure is None:
        with pytest.raises(RuntimeError, match=says("layer.weight", "cache_enabled=False")):
            loss.backward()
    else:
        loss.backward()
        assert_equal(gradients_of(model), gradients_of(whole), EXACT, "gradients")

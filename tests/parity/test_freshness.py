"""No unsharded copy outlives the parameters it was made from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from support.parity.compare import assert_equal, gradients_of, mean_over_ranks, rounding
from support.parity.engines import shard, tell
from support.parity.models import CASES, build
from support.parity.reference import adamw, my_rows, rows_of
from support.ranks import distributed

MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "enable_grad": torch.enable_grad,
}


@pytest.mark.cross
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reshard", [True, False, None], ids=["reshard", "keep", "default"])
@distributed(2)
def test_evaluation_between_steps_sees_the_parameters_of_the_last_step(
    mode: str, reshard: bool | None, world_size: int
) -> None:
    case, dtype = CASES["transformer"], torch.float64
    model, whole = shard(case, dtype=dtype, reshard_after_forward=reshard), build(case, dtype)
    optimizers = adamw(model), adamw(whole)

    def evaluate(step: int) -> None:
        with MODES[mode]():
            inputs, targets = rows_of(case.batch(9, dtype), my_rows())
            got = case.loss(model.eval()(inputs), targets).detach().clone()
            inputs, targets = case.batch(9, dtype)
            want = case.loss(whole.eval()(inputs), targets).detach().clone()
        allowed = rounding(world_size, steps=2 * step + 1)
        assert_equal({"loss": mean_over_ranks(got)}, {"loss": want}, allowed, f"step {step}")

    for step in range(3):
        evaluate(step)
        evaluate(step)
        inputs, targets = rows_of(case.batch(step, dtype), my_rows())
        case.loss(model.train()(inputs), targets).backward()
        inputs, targets = case.batch(step, dtype)
        case.loss(whole.train()(inputs), targets).backward()
        allowed = rounding(world_size, steps=2 * step + 1)
        assert_equal(gradients_of(model), gradients_of(whole), allowed, f"gradients {step}")
        evaluate(step)  # leaves copies unsharded, which the step makes stale
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.cross
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("mode", MODES)
@distributed(2)
def test_a_kept_copy_is_gathered_anew_after_a_step_of_any_kind(
    mode: str, foreach: bool, world_size: int
) -> None:
    model, whole = _pair(reshard_after_forward=False)
    inputs, _ = rows_of(CASES["uneven"].batch(0, torch.float64), my_rows())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, foreach=foreach) for m in (model, whole)]
    for step in range(3):
        model(inputs).sum().backward()
        whole(inputs).sum().backward()
        for sharded, plain in zip(model.parameters(), whole.parameters(), strict=True):
            assert sharded.grad is not None
            assert isinstance(sharded.grad, DTensor)
            plain.grad = sharded.grad.full_tensor()
        with MODES[mode]():
            model(inputs)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with MODES[mode]():
            got, want = model(inputs).detach().clone(), whole(inputs).detach().clone()
        allowed = rounding(world_size, steps=step + 1)
        assert_equal({"output": got}, {"output": want}, allowed, f"step {step}")


@distributed(2)
def test_a_kept_copy_is_gathered_anew_after_a_state_dict_was_loaded() -> None:
    model, _ = _pair(reshard_after_forward=False)
    inputs, _ = rows_of(CASES["uneven"].batch(0, torch.float64), my_rows())
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        before = model(inputs).clone()
    zeros = {name: torch.zeros_like(value) for name, value in saved.items()}
    model.load_state_dict(zeros)
    with torch.no_grad():
        assert not model(inputs).any()
    model.load_state_dict(saved)
    with torch.no_grad():
        assert torch.equal(model(inputs), before)


@distributed(2)
def test_a_kept_copy_is_gathered_anew_after_the_user_says_so() -> None:
    model, _ = _pair(reshard_after_forward=False)
    inputs, _ = rows_of(CASES["uneven"].batch(0, torch.float64), my_rows())
    shards = list(model.parameters())
    with torch.no_grad():
        assert model(inputs).any()
        for parameter in shards:
            parameter.zero_()
        tell(model, "parameters_changed")
        assert not model(inputs).any()


def _pair(**options: Any) -> tuple[nn.Module, nn.Module]:
    case = CASES["uneven"]
    return shard(case, dtype=torch.float64, **options), build(case, torch.float64)

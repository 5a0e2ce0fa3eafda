"""Hooks on gradients, and optimizers that step in backward: what torch's own gives, ours gives.

A hook on an unsharded parameter is called with this rank's gradient before reduction, one on a
sharded parameter after it, with a ``DTensor``; hooks from before sharding are gone in both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from support.modules import Assembled
from support.parity.compare import EXACT, assert_equal, gradients_of, parameters_of, rounding
from support.parity.engines import OURS, TORCH, Engine, shard, tell
from support.parity.models import CASES, build
from support.parity.reference import my_rows, rows_of
from support.ranks import distributed

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")

NAME, DTYPE = "uneven", torch.float64
CASE = CASES[NAME]

Seen = list[tuple[str, str, tuple[int, ...], float]]


def _backward(model: nn.Module, step: int = 0, rows: slice | None = None) -> None:
    inputs, targets = rows_of(CASE.batch(step, DTYPE), my_rows() if rows is None else rows)
    CASE.loss(model(inputs), targets).backward()


def _note(seen: Seen, name: str, gradient: torch.Tensor) -> None:
    whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    seen.append((name, type(gradient).__name__, tuple(gradient.shape), whole.sum().item()))


# -- hooks ----------------------------------------------------------------------------------------


def _on_tensor(param: nn.Parameter, note: Callable[[torch.Tensor], None]) -> None:
    param.register_hook(note)


def _after_accumulation(param: nn.Parameter, note: Callable[[torch.Tensor], None]) -> None:
    def hook(accumulated: torch.Tensor) -> None:
        assert accumulated.grad is not None
        note(accumulated.grad)

    param.register_post_accumulate_grad_hook(hook)


KINDS = {"on-the-tensor": _on_tensor, "after-accumulation": _after_accumulation}


def _hooked_unsharded(engine: Engine, kind: str) -> Seen:
    """What hooks see that the first forward registers, on what the modules hold then."""
    seen: Seen = []
    model = shard(CASE, engine, dtype=DTYPE)
    hooked: set[int] = set()

    def register(module: nn.Module, args: Any) -> None:
        for name, param in module.named_parameters(recurse=False):
            if id(param) not in hooked:
                hooked.add(id(param))
                KINDS[kind](param, lambda grad, name=name: _note(seen, name, grad))  # type: ignore[misc]  # a default

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(register)
    for step in range(2):
        _backward(model, step)
    return seen


@pytest.mark.parametrize("kind", KINDS)
@distributed(2)
def test_hooks_on_unsharded_parameters_see_what_they_see_under_torchs_own(kind: str) -> None:
    seen = _hooked_unsharded(OURS, kind)
    assert seen == _hooked_unsharded(TORCH, kind)
    assert len(seen) == 2 * len(list(build(CASE).parameters()))
    assert all(kind_of_tensor == "Tensor" for _, kind_of_tensor, _, _ in seen)


@distributed(2)
def test_a_hook_on_an_unsharded_parameter_changes_what_is_reduced(world_size: int) -> None:
    model, whole = shard(CASE, dtype=DTYPE), build(CASE, DTYPE)
    done: list[nn.Module] = []

    def register(module: nn.Module, args: Any) -> None:
        if module not in done:
            done.append(module)
            module.get_parameter("weight").register_hook(lambda grad: 3 * grad)

    for each in (model, whole):
        each.get_submodule("second").register_forward_pre_hook(register)
    _backward(model)
    _backward(whole, rows=slice(None))
    assert_equal(gradients_of(model), gradients_of(whole), rounding(world_size), "gradients")


def _hooked_sharded(engine: Engine) -> Seen:
    seen: Seen = []
    model = shard(CASE, engine, dtype=DTYPE)
    for name, param in model.named_parameters():
        _after_accumulation(param, lambda grad, name=name: _note(seen, name, grad))  # type: ignore[misc]  # a default
    for step in range(2):
        _backward(model, step)
    return seen


@distributed(2)
def test_hooks_on_sharded_parameters_see_each_accumulated_gradient_as_under_torchs_own() -> None:
    """The order among parameters is each engine's own; what a hook sees is not."""
    seen, expected = _hooked_sharded(OURS), _hooked_sharded(TORCH)
    assert sorted(seen) == sorted(expected)
    assert all(kind == "DTensor" for _, kind, _, _ in seen)
    assert len(seen) == 2 * len(list(build(CASE).parameters()))


@distributed(2)
def test_full_backward_hooks_of_modules_see_what_they_see_under_torchs_own() -> None:
    runs = []
    for engine in (OURS, TORCH):
        seen: list[tuple[str, list[float]]] = []
        model = shard(CASE, engine, dtype=DTYPE)
        names = {module: name for name, module in model.named_modules()}

        def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
            given = [*grad_input, *grad_output]
            seen.append((names[module], [g.sum().item() for g in given if g is not None]))  # noqa: B023

        for module in names:
            module.register_full_backward_hook(hook)
        inputs, targets = rows_of(CASE.batch(0, DTYPE), my_rows())
        CASE.loss(model(inputs.requires_grad_()), targets).backward()
        runs.append(seen)
    assert runs[0] == runs[1]
    assert len(runs[0]) == 4


# -- an optimizer that steps in backward ----------------------------------------------------------


def _steps_in_backward(model: nn.Module) -> list[torch.optim.Optimizer]:
    """One optimizer per parameter, which steps when its gradient is there, and then drops it."""
    optimizers: list[torch.optim.Optimizer] = []
    for param in model.parameters():
        optimizer = torch.optim.AdamW([param], lr=1e-2, eps=1e-2)

        def hook(accumulated: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        param.register_post_accumulate_grad_hook(hook)
        optimizers.append(optimizer)
    return optimizers


@pytest.mark.cross
@pytest.mark.parametrize("reshard", [True, False, None])
@distributed(2, 4, matrix=[4])
def test_an_optimizer_in_backward_equals_one_after_it(
    reshard: bool | None, world_size: int
) -> None:
    model = shard(CASE, dtype=DTYPE, reshard_after_forward=reshard)
    whole = build(CASE, DTYPE)
    _steps_in_backward(model)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, eps=1e-2)
    for step in range(4):
        _backward(model, step)
        assert all(param.grad is None for param in model.parameters())
        _backward(whole, step, slice(None))
        optimizer.step()
        optimizer.zero_grad()
    allowed = rounding(world_size, steps=5)
    assert_equal(parameters_of(model), parameters_of(whole), allowed, "parameters")


@distributed(2)
def test_an_optimizer_in_backward_waits_for_the_reduction_under_accumulation(
    world_size: int,
) -> None:
    model, whole = shard(CASE, dtype=DTYPE), build(CASE, DTYPE)
    _steps_in_backward(model)
    before = parameters_of(model)
    tell(model, "set_requires_gradient_sync", False)
    _backward(model, 0)
    assert_equal(parameters_of(model), before, EXACT, "after the first micro-batch")
    tell(model, "set_requires_gradient_sync", True)
    _backward(model, 1)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, eps=1e-2)
    for step in range(2):
        _backward(whole, step, slice(None))
    optimizer.step()
    allowed = rounding(world_size, steps=2)
    assert_equal(parameters_of(model), parameters_of(whole), allowed, "parameters")


@distributed(2)
def test_a_rank_that_does_not_use_a_parameter_steps_it_in_backward_all_the_same() -> None:
    """Its gradient is the other rank's, halved."""
    model = nn.ModuleList(nn.Linear(3, 2).double() for _ in range(2))
    torch.manual_seed(5)
    outer = Assembled(lambda m, x, choice: m.parts[choice](x), parts=model)
    OURS.fully_shard(outer)
    _steps_in_backward(outer)
    before = parameters_of(outer)
    outer(torch.ones(2, 3).double(), dist.get_rank()).sum().backward()
    after = parameters_of(outer)
    for name, value in after.items():
        start = before[name]
        assert value is not None
        assert start is not None
        assert (value != start).any(), name

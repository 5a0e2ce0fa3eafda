"""``twice()`` leaves what one computation leaves, and blames no host for a program's own state."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations

from fullshard.insight import DamagedNumbersError, IntegrityChecks, IntegrityPolicy
from fullshard.sharding import fully_shard
from fullshard.sharding.spi import local_of, sharded_of
from support.ranks import cpu_mesh, distributed


class _Buffers(nn.Module):
    """Changes buffers in the ways that modules have, and draws random numbers."""

    added_to: torch.Tensor
    replaced: torch.Tensor
    late: torch.Tensor | None
    expanded: torch.Tensor
    sparse: torch.Tensor
    registered: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("added_to", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(6), persistent=False)
        self.register_buffer("late", None)
        self.register_buffer("expanded", torch.ones(1).expand(6))
        self.register_buffer("sparse", torch.eye(6).to_sparse())
        self.sharing = nn.Module()
        self.sharing.register_buffer("same", self.added_to)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.added_to += 1
        self.replaced = self.replaced + values.detach().mean(0)
        self.late = torch.ones(()) if self.late is None else self.late + 1
        if not hasattr(self, "registered"):
            self.register_buffer("registered", torch.zeros(()))
        self.registered += 1
        self.sparse = self.sparse * 2
        drawn = random.random() + torch.rand(())
        scale = drawn + self.added_to + self.replaced + self.late + self.registered
        return values @ self.sparse.to_dense() * scale * self.expanded


MODULES: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm": lambda: nn.BatchNorm1d(6),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(6, 6)),
    "dropout": lambda: nn.Dropout(0.5),
    "own buffers": _Buffers,
}


def _made(middle: Callable[[], nn.Module]) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    random.seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 6), middle(), nn.Linear(6, 1))
    fully_shard(model[0], mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _batch(number: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))


def _compute(model: Any, *numbers: int) -> None:
    for number in numbers:
        model.set_requires_gradient_sync(number == numbers[-1])
        model(_batch(number)).square().mean().backward()


def _left(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return buffers, gradients and the next random numbers."""
    found = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, param in model.named_parameters():
        gradient = sharded_of(param).grad
        assert gradient is not None
        found[f"gradient of {name}"] = local_of(gradient).clone()
    found["random"] = torch.tensor([random.random(), torch.rand(()).item()])
    return found


def _assert_alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name].to_dense(), other[name].to_dense()), name


def _checks(model: nn.Module, optimizer: torch.optim.Optimizer) -> IntegrityChecks:
    checks = IntegrityChecks(model, optimizer, IntegrityPolicy(every=1))
    checks.begin()
    return checks


@pytest.mark.parametrize("middle", MODULES)
@distributed(2)
def test_twice_leaves_what_one_computation_leaves_and_raises_no_alarm(middle: str) -> None:
    """Also of gradients that earlier micro-batches left, and of micro-batches inside."""
    left = []
    for twice in (False, True):
        model, optimizer = _made(MODULES[middle])
        _compute(model, 0)
        if twice:
            checks = _checks(model, optimizer)
            checks.twice(partial(_compute, model, 1, 2))
            checks.before_update()
            assert checks.comparisons
        else:
            _compute(model, 1, 2)
        left.append(_left(model))
    _assert_alike(*left)


@distributed(2)
def test_twice_scales_the_loss_as_one_computation_does() -> None:
    left = []
    for twice in (False, True):
        model, optimizer = _made(MODULES["BatchNorm"])
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

        def compute(model: Any = model, scaler: Any = scaler) -> None:
            scaler.scale(model(_batch(1)).square().mean()).backward()

        if twice:
            checks = _checks(model, optimizer)
            checks.twice(compute)
        else:
            compute()
        scaler.unscale_(optimizer)
        if twice:
            checks.before_update()
        scaler.step(optimizer)
        scaler.update()
        left.append(_left(model) | {"scale": torch.tensor(scaler.get_scale())})
    _assert_alike(*left)


@distributed(2)
def test_gradients_of_an_optimizer_that_the_model_lacks_are_computed_once() -> None:
    model, _ = _made(nn.ReLU)
    weight = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), weight], lr=0.1)
    checks = _checks(model, optimizer)
    checks.twice(lambda: (weight * model(_batch(0)).square().mean()).backward())
    checks.before_update()
    assert weight.grad is not None
    assert torch.equal(weight.grad, model(_batch(0)).square().mean())


class _FailsAt(nn.Module):
    """Raises in one of its calls."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.calls, self.call = 0, call

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.call:
            raise ValueError("planted")
        return values


@pytest.mark.parametrize("run", [1, 2])
@distributed(2)
def test_after_an_error_of_either_run_the_step_can_be_computed_again(run: int) -> None:
    """After the first, all is as before; after the second, as after one run that raised."""

    def make(call: int) -> tuple[Any, torch.optim.Optimizer]:
        made = _made(lambda: nn.Sequential(nn.BatchNorm1d(6), _FailsAt(call)))
        _compute(made[0], 0)
        return made

    plain, _ = make(2 if run == 2 else 0)
    if run == 2:
        with pytest.raises(ValueError, match="planted"):
            _compute(plain, 1)
    _compute(plain, 1)
    expected = _left(plain)
    model, optimizer = make(1 + run)
    checks = _checks(model, optimizer)
    with pytest.raises(ValueError, match="planted"):
        checks.twice(lambda: _compute(model, 1))
    checks.twice(lambda: _compute(model, 1))
    checks.before_update()
    _assert_alike(expected, _left(model))


@distributed(2)
def test_gradients_that_wait_for_a_later_reduction_are_refused_on_all_ranks() -> None:
    """A repeated computation would add to them twice."""
    model, optimizer = _made(nn.ReLU)
    checks = _checks(model, optimizer)
    model.set_requires_gradient_sync(False)
    with pytest.raises(RuntimeError, match="not reduced, after compute ran; let its last backward"):
        checks.twice(lambda: model(_batch(0)).sum().backward())
    with pytest.raises(RuntimeError, match="not reduced, before compute ran; let compute run all"):
        checks.twice(lambda: _compute(model, 1))


class _Counts(nn.Module):
    """Has state that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(())

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return values * self.count


@distributed(2)
def test_the_error_says_that_state_outside_of_buffers_may_explain_a_difference() -> None:
    model, optimizer = _made(_Counts)
    checks = _checks(model, optimizer)
    checks.twice(lambda: _compute(model, 1))
    with pytest.raises(DamagedNumbersError, match=r"on all ranks, .* state outside of buffers"):
        checks.before_update()

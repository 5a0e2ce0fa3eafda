"""Optimizers that step elsewhere: the same numbers as at home, and nobody sees the difference.

"Elsewhere" is a stand-in: a policy that copies on this device and notes what it copied. Right is
what the same optimizer does to the same sharded model without it, bit for bit.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.sharding import NoOffload, fully_shard
from fullshard.sharding.base.compat import local_shard
from support.parity.compare import EXACT, assert_equal, parameters_of
from support.products import few
from support.ranks import cpu_mesh, distributed
from support.surface.model import train


@dataclass(frozen=True, kw_only=True)
class Elsewhere(NoOffload):
    """Steps on copies; a copy is known by an attribute.

    Attributes:
        copied: the shapes of what was copied there.
        waits: how often the host waited.
    """

    copied: list[torch.Size] = field(default_factory=list)
    waits: list[torch.device] = field(default_factory=list)

    def stage_step(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if getattr(tensor, "is_elsewhere", False):
            return tensor
        self.copied.append(tensor.shape)
        there = tensor.clone()
        there.is_elsewhere = True  # type: ignore[attr-defined]  # the mark of this test
        return there

    def arrived(self, device: torch.device) -> None:
        self.waits.append(device)


def _model() -> nn.Sequential:
    torch.manual_seed(31)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def _sharded(policy: NoOffload, **options: Any) -> nn.Sequential:
    model = _model()
    fully_shard(model[0], mesh=cpu_mesh(), offload_policy=policy, **options)
    fully_shard(model, mesh=cpu_mesh(), offload_policy=policy, **options)
    return model


def _pair(**options: Any) -> tuple[nn.Sequential, nn.Sequential, Elsewhere]:
    """A model that is stepped elsewhere, the same one at home, and the policy of the first."""
    policy = Elsewhere()
    return _sharded(policy, **options), _sharded(NoOffload(), **options), policy


def _batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, 5, generator=generator, dtype=torch.float64)


def _loss(model: nn.Module, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(_batch(step)).square().mean()
    return loss


def _steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: range = range(3)
) -> list[float]:
    return train(model, optimizer, steps, _batch)


def _assert_same(model: nn.Module, other: nn.Module) -> None:
    assert_equal(parameters_of(model), parameters_of(other), EXACT, "parameters")


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False),
    "sgd-foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=False),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.1),
}


@pytest.mark.parametrize("name", few(OPTIMIZERS, "sgd-foreach", "adamw", "adamw-fused", "asgd"))
@distributed(2)
def test_steps_elsewhere_equal_steps_at_home(name: str) -> None:
    model, home, policy = _pair()
    losses = _steps(model, OPTIMIZERS[name](model.parameters()))
    assert losses == _steps(home, OPTIMIZERS[name](home.parameters()))
    _assert_same(model, home)
    assert policy.copied


@distributed(2)
def test_a_copy_kept_unsharded_is_renewed_after_a_step_elsewhere() -> None:
    model, home, _ = _pair(reshard_after_forward=False)
    for each in (model, home):
        each.set_reshard_after_backward(False)  # type: ignore[operator]  # a sharded module has it
    make = OPTIMIZERS["sgd"]
    assert _steps(model, make(model.parameters())) == _steps(home, make(home.parameters()))
    _assert_same(model, home)


@distributed(2)
def test_a_step_moves_each_shard_and_gradient_once_and_the_state_never() -> None:
    model, _, policy = _pair()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    _steps(model, optimizer)
    policy.copied.clear()
    policy.waits.clear()
    _steps(model, optimizer)
    shards = [param.to_local().shape for param in model.parameters() if isinstance(param, DTensor)]
    assert len(shards) == 4
    assert policy.copied == 3 * [*shards, *shards]  # parameters, then gradients
    assert len(policy.waits) == 3 * 3  # at the end of backward, before a step, and after it


@distributed(2)
def test_before_and_after_a_step_the_optimizer_holds_the_models_parameters() -> None:
    model, _, _ = _pair()
    params = list(model.parameters())
    optimizer = OPTIMIZERS["adamw"](params)
    groups = optimizer.param_groups
    lists = [group["params"] for group in groups]
    state = optimizer.state
    _steps(model, optimizer)
    assert optimizer.param_groups is groups
    assert optimizer.state is state
    assert all(group["params"] is each for group, each in zip(groups, lists, strict=True))
    assert all(each is param for each, param in zip(lists[0], params, strict=True))
    assert all(each is param for each, param in zip(state, params, strict=True))


class _Steps(torch.optim.SGD):
    """Plain SGD that notes what it steps, counts in its group, and fails when told to."""

    def __init__(self, params: Any, *, momentum: float = 0.0) -> None:
        super().__init__(params, lr=0.1, momentum=momentum, foreach=False)
        self.param_groups[0]["count"] = 0
        self.seen: list[nn.Parameter] = []
        self.fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.seen = [*self.param_groups[0]["params"]]
        self.param_groups[0]["count"] += 1
        self.latest = self.param_groups[0]["count"]
        super().step.__wrapped__(self, closure)  # type: ignore[attr-defined]  # without its hooks
        if self.fails:
            raise ArithmeticError("told to")


@distributed(2)
def test_what_a_step_changes_in_its_groups_and_attributes_is_kept() -> None:
    model, _, _ = _pair()
    optimizer = _Steps(model.parameters())
    _steps(model, optimizer)
    assert optimizer.param_groups[0]["count"] == optimizer.latest == 3
    params = list(model.parameters())
    assert not any(each is param for each, param in zip(optimizer.seen, params, strict=True))


@distributed(2)
def test_a_step_that_raises_leaves_parameters_and_optimizer_and_the_next_one_is_right() -> None:
    model, home, _ = _pair()
    optimizer, expected = _Steps(model.parameters()), _Steps(home.parameters())
    _loss(model, 0).backward()
    before = parameters_of(model)
    optimizer.fails = True
    with pytest.raises(ArithmeticError, match="told to"):
        optimizer.step()
    optimizer.fails = False
    assert_equal(parameters_of(model), before, EXACT, "after the error")
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    assert _steps(model, optimizer) == _steps(home, expected)
    _assert_same(model, home)


# -- programs that see no difference --------------------------------------------------------------


class _Twice(torch.optim.Optimizer):
    """Wraps an optimizer, whose groups it shares, and changes parameters before and after it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.param_groups = inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(0.9)
        self.inner.step()
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(0.01 * param.grad)


def _hooked(model: nn.Module) -> list[Any]:
    """Hooks see gradients before and parameters after the step."""
    optimizer, seen = OPTIMIZERS["sgd"](model.parameters()), []

    def halve(*_: Any) -> None:
        for param in model.parameters():
            assert param.grad is not None
            param.grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    optimizer.register_step_post_hook(lambda *_: seen.append(parameters_of(model)))
    _steps(model, optimizer)
    return seen


def _hooked_later(model: nn.Module) -> None:
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    _steps(model, optimizer, steps=range(1))

    def drop(*_: Any) -> None:
        next(model.parameters()).grad = None

    optimizer.register_step_pre_hook(drop)
    _steps(model, optimizer)


def _with_closure(model: nn.Module) -> None:
    """Two steps of LBFGS, each of which runs its closure several times."""
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = _loss(model, 0)
        loss.backward()
        dist.all_reduce(loss.detach())
        return loss.detach()

    optimizer.step(closure)
    optimizer.step(closure=closure)


def _changing_closure(model: nn.Module, kind: Any = torch.optim.SGD) -> None:
    """A closure changes the rate, the state and a parameter."""
    optimizer = kind(model.parameters(), momentum=0.9)
    _steps(model, optimizer)

    def closure() -> torch.Tensor:
        optimizer.param_groups[0]["lr"] = 0.5
        for state in optimizer.state.values():
            state["momentum_buffer"] = torch.zeros_like(state["momentum_buffer"])
        next(model.parameters()).data.mul_(0.5)
        loss = _loss(model, 3)
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.zero_grad()
    _steps(model, optimizer)
    assert optimizer.param_groups[0].get("count", 7) == 7


def _scheduled_and_scaled(model: nn.Module) -> None:
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        scaler.scale(_loss(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
    assert optimizer.param_groups[0]["lr"] == 0.1 / 8


def _beside_a_plain_parameter(model: nn.Module) -> list[Any]:
    extra = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = OPTIMIZERS["sgd"]([*model.parameters(), extra])
    for step in range(2):
        (_loss(model, step) + extra.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(extra, torch.ones(3, dtype=torch.float64))
    return [{"extra": extra.detach()}]


PROGRAMS: dict[str, Callable[[nn.Module], Any]] = {
    "hooks": _hooked,
    "a hook registered after the first step": _hooked_later,
    "a closure that runs several times": _with_closure,
    "a closure that changes things": _changing_closure,
    "a closure of an optimizer of one's own": partial(_changing_closure, kind=_Steps),
    "a scheduler and a scaler": _scheduled_and_scaled,
    "an optimizer around another": lambda model: _steps(
        model, _Twice(OPTIMIZERS["adamw"](model.parameters()))
    ),
    "a plain parameter": _beside_a_plain_parameter,
}


@pytest.mark.parametrize(
    "program",
    few(
        PROGRAMS,
        "hooks",
        "a closure that changes things",
        "a scheduler and a scaler",
        "an optimizer around another",
        "a plain parameter",
    ),
)
@distributed(2)
def test_a_program_leaves_the_same_elsewhere_as_at_home(program: str) -> None:
    model, home, _ = _pair()
    mine, expected = PROGRAMS[program](model), PROGRAMS[program](home)
    _assert_same(model, home)
    assert type(mine) is type(expected)
    for left, right in zip(mine or [], expected or [], strict=True):
        if isinstance(left, float):
            assert left == right
        else:
            assert_equal(left, right, EXACT, "what the program saw")


@distributed(2)
def test_a_closure_never_computes_on_a_copy_from_before_the_last_change() -> None:
    """Where parameters stay unsharded from one run of the closure to the next."""
    kept = _sharded(Elsewhere(), reshard_after_forward=False)
    kept.set_reshard_after_backward(False)  # type: ignore[operator]  # a sharded module has it
    home = _sharded(NoOffload())
    for each in (kept, home):
        _with_closure(each)
    _assert_same(kept, home)


@pytest.mark.parametrize("before_the_first_step", [True, False])
@distributed(2)
def test_a_loaded_state_is_brought_to_where_steps_are(before_the_first_step: bool) -> None:
    model, home, policy = _pair()
    theirs = OPTIMIZERS["adamw"](home.parameters())
    _steps(home, theirs)
    saved = copy.deepcopy(theirs.state_dict())
    model.load_state_dict(home.state_dict())
    mine = OPTIMIZERS["adamw"](model.parameters())
    if not before_the_first_step:
        mine.zero_grad()
        _loss(model, 7).backward()
        mine.step()  # now its hooks are there
        mine.zero_grad()
        model.load_state_dict(home.state_dict())
    mine.load_state_dict(saved)
    policy.copied.clear()
    assert _steps(model, mine) == _steps(home, theirs)
    _assert_same(model, home)
    for param in model.parameters():
        assert hasattr(local_shard(mine.state[param]["exp_avg"]), "is_elsewhere")
        assert not hasattr(mine.state[param]["step"], "is_elsewhere")  # torch keeps it on the host


@distributed(2)
def test_nothing_of_a_step_outlives_it_and_an_optimizer_can_die() -> None:
    model, _, _ = _pair()
    optimizer = _Steps(model.parameters())
    _steps(model, optimizer)
    seen = [weakref.ref(each) for each in optimizer.seen]
    optimizer.seen.clear()
    assert all(each() is None for each in seen)
    dies = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert dies() is None

"""Optimizers end to end: what users put around a step, against the unsharded model.

[Note: tolerance] Gradients differ by the rounding of their sums. Momentum is rounded to bf16 before
it is orthogonalised, so a difference may turn one rounding: 2 ** -8 of an element's update, which
is at most about 1, per step. SOAP is compared where its bases are defined: preconditioners of
full rank, so only of the shorter sides, and an ``eps`` far over the rounding of gradients. In 8-bit
AdamW a difference may turn a code, of which neighbours are up to 2 ** -6 of the largest in a block
apart, and an average of squares that is a code too small raises the update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fullshard.optim import SOAP, AdamW8bit, Muon, clip_grad_norm_, matrix_groups
from fullshard.policies import CPUOffloadPolicy
from fullshard.sharding import NoOffload, fully_shard
from support.optim.training import Small, batch, loss_of
from support.optim.ways import full_values
from support.ranks import cpu_mesh, distributed

LR, STEPS = 0.05, 10


def _muon(model: nn.Module) -> Optimizer:
    return Muon(matrix_groups(model, exclude=["head.weight"]), lr=LR)


def _soap(model: nn.Module) -> Optimizer:
    groups = matrix_groups(model, algorithm="soap", exclude=["head.weight"])
    return SOAP(groups, lr=LR, eps=1e-2, precondition_frequency=3, max_precond_dim=6)


def _adamw8bit(model: nn.Module) -> Optimizer:
    return AdamW8bit(model.parameters(), lr=LR, eps=1e-3)


Maker = Callable[[nn.Module], Optimizer]
Around = Callable[[nn.Module, Optimizer], None]
MAKERS = [_muon, _soap, _adamw8bit]
TURNED: dict[Maker, float] = {_muon: 2**-8, _soap: 2**-8, _adamw8bit: 2**-4}


def _small(make: Maker) -> Small:
    """Wide enough that its hidden matrices have states of 8 bits, where that is asked for."""
    return Small(64 if make is _adamw8bit else 6)


def _sharded(make: Maker = _muon, **options: Any) -> Small:
    model = _small(make)
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=cpu_mesh(), **options)
    fully_shard(model, mesh=cpu_mesh(), **options)
    return model


def _assert_close(
    found: nn.Module, expected: nn.Module, steps: int = STEPS, make: Maker = _muon
) -> None:
    values, wanted = full_values(found), full_values(expected)
    for name in wanted:
        apart = (values[name] - wanted[name]).abs().max().item()
        assert apart <= steps * LR * TURNED[make], (name, apart)


def _rows(tokens: torch.Tensor) -> torch.Tensor:
    return tokens.chunk(dist.get_world_size())[dist.get_rank()]


def _train(
    model: nn.Module,
    rows: Callable[[torch.Tensor], torch.Tensor],
    make: Maker,
    around: Around = lambda model, optimizer: optimizer.step(),
) -> Optimizer:
    optimizer = make(model)
    for step in range(STEPS):
        loss_of(model, rows(batch(step))).backward()
        around(model, optimizer)
        optimizer.zero_grad()
    return optimizer


def _clipped(clip: Callable[..., Any]) -> Around:
    def around(model: nn.Module, optimizer: Optimizer) -> None:
        clip(model.parameters(), 0.05)
        optimizer.step()

    return around


@pytest.mark.parametrize("make", MAKERS)
@distributed(2, 4, matrix=[4])
def test_ten_steps_are_those_of_the_unsharded_model(make: Maker) -> None:
    whole, sharded = _small(make), _sharded(make)
    _train(whole, lambda tokens: tokens, make)
    _train(sharded, _rows, make)
    _assert_close(sharded, whole, make=make)
    moved = full_values(whole)["up.weight"] - _small(make).up.weight.detach()
    assert moved.abs().max() > 20 * LR * 2**-8


@pytest.mark.cross
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("clip", [clip_grad_norm_, torch.nn.utils.clip_grad_norm_])
@distributed(2)
def test_clipped_gradients_are_stepped_as_the_unsharded_models(
    clip: Callable[..., Any], make: Maker
) -> None:
    whole, sharded = _small(make), _sharded(make)
    _train(whole, lambda tokens: tokens, make, _clipped(torch.nn.utils.clip_grad_norm_))
    _train(sharded, _rows, make, _clipped(clip))
    _assert_close(sharded, whole, make=make)


@pytest.mark.parametrize("make", MAKERS)
@distributed(2)
def test_accumulated_gradients_are_one_step(make: Maker) -> None:
    whole, sharded = _small(make), _sharded(make)
    optimizers = make(whole), make(sharded)
    for step in range(STEPS):
        for half in (slice(0, 4), slice(4, 8)):
            tokens = batch(step)[half]
            (loss_of(whole, tokens) / 2).backward()
            sharded.set_requires_gradient_sync(half.stop == 8)  # type: ignore[operator]  # an FSDPModule
            (loss_of(sharded, _rows(tokens)) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    _assert_close(sharded, whole, make=make)


@distributed(2)
def test_a_schedule_of_the_rate_reaches_both_kinds_of_group() -> None:
    def around() -> Around:
        made: list[torch.optim.lr_scheduler.LRScheduler] = []

        def step(model: nn.Module, optimizer: Optimizer) -> None:
            if not made:
                made.append(torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5))
            optimizer.step()
            made[0].step()

        return step

    whole, sharded = Small(), _sharded()
    _train(whole, lambda tokens: tokens, _muon, around())
    optimizer = _train(sharded, _rows, _muon, around())
    assert [group["lr"] for group in optimizer.param_groups] == [LR * 0.5**5] * 2
    _assert_close(sharded, whole)


class _Elsewhere(NoOffload):
    """Steps on copies."""

    def stage_step(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if getattr(tensor, "is_elsewhere", False):
            return tensor
        there = tensor.clone()
        there.is_elsewhere = True  # type: ignore[attr-defined]  # the mark of this test
        return there


@pytest.mark.cross
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("policy", [CPUOffloadPolicy(pin_memory=False), _Elsewhere()])
@distributed(2)
def test_offloaded_parameters_are_stepped_bit_for_bit_as_others(policy: Any, make: Maker) -> None:
    offloaded, at_home = _sharded(make, offload_policy=policy), _sharded(make)
    for model in (offloaded, at_home):
        _train(model, _rows, make)
    values, expected = full_values(offloaded), full_values(at_home)
    assert all(torch.equal(values[name], expected[name]) for name in expected)


@pytest.mark.parametrize("make", MAKERS)
@distributed(2)
def test_an_infinity_on_one_rank_makes_all_skip_before_anything_is_sent(make: Maker) -> None:
    whole, sharded = _small(make), _sharded(make)
    runs = []
    for model in (whole, sharded):
        runs.append((model, make(model), torch.amp.GradScaler("cpu", init_scale=8.0)))
    for step in range(4):
        for model, optimizer, scaler in runs:
            rows = batch(step) if model is whole else _rows(batch(step))
            scaler.scale(loss_of(model, rows)).backward()
            if step == 2:
                _spoil(model)
            before = full_values(model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            after = full_values(model)
            first = make is _soap and step == 0  # no matrix moves
            names = [name for name in after if not (first and name in ("up.weight", "down.weight"))]
            moved = [not torch.equal(before[name], after[name]) for name in names]
            assert all(moved) if step != 2 else not any(moved)
            assert scaler.get_scale() == (8.0 if step < 2 else 4.0)
    _assert_close(sharded, whole, 4, make)


def _spoil(model: nn.Module) -> None:
    grad: Any = model.get_parameter("up.weight").grad
    if not hasattr(grad, "to_local"):
        grad[0, 0] = float("inf")
    elif dist.get_rank() == 0:
        grad.to_local()[0, 0] = float("inf")


@pytest.mark.parametrize("make", MAKERS)
@distributed(2)
def test_a_closure_is_run_once_and_its_loss_returned(make: Maker) -> None:
    model = _sharded(make)
    optimizer: Any = make(model)
    calls: list[torch.Tensor] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        calls.append(loss_of(model, _rows(batch(0))))
        calls[-1].backward()
        return calls[-1]

    before = full_values(model)
    assert optimizer.step(closure) is calls[0] and len(calls) == 1
    assert not torch.equal(full_values(model)["head.weight"], before["head.weight"])


def test_groups_leave_embeddings_and_what_is_named_and_what_is_no_matrix_to_adamw() -> None:
    model = Small()
    matrices, rest = matrix_groups(model, exclude=["head.*"], adamw={"lr": 3.0})
    assert matrices["params"] == [model.up.weight, model.down.weight]
    assert rest["algorithm"] == "adamw" and rest["lr"] == 3.0
    assert len(rest["params"]) == len(list(model.parameters())) - 2
    model.head.weight = model.embedding.weight
    assert len(matrix_groups(model)[0]["params"]) == 2
    model.up.weight.requires_grad_(False)
    assert matrix_groups(model)[0]["params"] == [model.down.weight]
    with pytest.raises(ValueError, match=r"'heads.*' *, which matches no parameter"):
        matrix_groups(model, exclude=["heads.*"])

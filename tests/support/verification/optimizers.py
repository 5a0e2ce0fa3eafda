"""Faults of optimizers: clipping, rates, decay, steps, state, and what they leave out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.preflight import Phase
from support.verification.fault import Fault

BY_RANK = "an optimizer that is not the same on all ranks"
BY_SHARD = "an optimizer that decides by the shard"
DECAY = "weight decay that is not the same"
LOST = "optimizer state that is lost"
SCALED = "updates scaled by one factor"
SETTINGS = "optimizer settings that are not the same"
TWICE = "an optimizer that steps twice"
UNALIKE = "an optimizer that does not step alike"
UNCOVERED = "parameters that the optimizer does not have"

COUPLED = "updates that depend on all gradients are not compared layer by layer"

Params = Iterable[nn.Parameter]


def _are_sharded(params: Params) -> bool:
    return any(isinstance(each, DTensor) for each in params)


class _Meddling(torch.optim.AdamW):
    """Does something before or after its step, when sharded."""

    def __init__(
        self,
        params: Params,
        before: Callable[[Any], object] = lambda optimizer: None,
        after: Callable[[Any], object] = lambda optimizer: None,
    ) -> None:
        super().__init__(params, lr=1e-2)
        self._before, self._after = before, after

    @property
    def params(self) -> list[Any]:
        return [each for group in self.param_groups for each in group["params"]]

    def plain(self) -> None:
        super().step()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        sharded = _are_sharded(self.params)
        if sharded:
            self._before(self)
        super().step()
        if sharded:
            self._after(self)


def _forget(optimizer: Any) -> None:
    optimizer.state.clear()


def _forget_on_rank_1(optimizer: Any) -> None:
    if dist.get_rank() == 1:
        optimizer.state.clear()


def _decay(optimizer: Any) -> None:
    for param in optimizer.params:
        param.mul_(1 - 1e-3)


def _one_element(optimizer: Any) -> None:
    if dist.get_rank() == 0:
        optimizer.params[0].to_local().view(-1)[1] += 0.1


def _stale_average(optimizer: Any) -> None:
    for param in optimizer.params:
        if "exp_avg_sq" in optimizer.state[param]:
            optimizer.state[param]["exp_avg_sq"].mul_(0.5)


class _Skipping(torch.optim.SGD):
    """Rank 1 makes no step."""

    def step(self, closure: Any = None) -> Any:
        params = [each for group in self.param_groups for each in group["params"]]
        if not (_are_sharded(params) and dist.get_rank() == 1):
            super().step(closure)


class _ByRank(torch.optim.SGD):
    """Uses another rate on rank 1, which its settings do not show."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            param.sub_(0.1 * (1 + dist.get_rank()) * param.grad)


class _ByShard(torch.optim.Optimizer):
    """Scales by something of what it holds: of a shard, the shard's."""

    def __init__(self, params: Params, scale: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(params, {})
        self._scale = scale

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            own, grad = (
                each.to_local() if isinstance(each, DTensor) else each
                for each in (param, param.grad)
            )
            own.sub_(0.1 * grad / self._scale(grad))


class _ClippedByShard(torch.optim.SGD):
    """Clips by the norm of what this rank holds of all gradients."""

    def step(self, closure: Any = None) -> Any:
        grads = [each.grad for group in self.param_groups for each in group["params"]]
        local = [each.to_local() if isinstance(each, DTensor) else each for each in grads]
        norm = torch.stack([each.norm() for each in local]).norm()
        for each in local:
            each.mul_((0.01 / norm).clamp(max=1.0))
        return super().step(closure)


class _ClippedMore(torch.optim.SGD):
    """Clips by the right norm, and by less when sharded."""

    def step(self, closure: Any = None) -> Any:
        params = [each for group in self.param_groups for each in group["params"]]
        norms = [each.grad.norm() for each in params]
        whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in norms]
        bound = 0.005 if _are_sharded(params) else 0.01
        for param in params:
            param.grad.mul_(bound / float(torch.stack(whole).norm()))
        return super().step(closure)


class _ClippedOnRank1(torch.optim.SGD):
    """Rank 1 alone clips."""

    def step(self, closure: Any = None) -> Any:
        if dist.get_rank() == 1:
            for param in self.param_groups[0]["params"]:
                param.grad.mul_(0.25)
        return super().step(closure)


def _adamw(params: Params, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **{"lr": 1e-2, **options})


def _when_sharded(
    params: Params, make: Callable[..., torch.optim.Optimizer] = _adamw, **options: Any
) -> torch.optim.Optimizer:
    params = list(params)
    return make(params, **(options if _are_sharded(params) else {}))


def _on_rank_1(params: Params, **options: Any) -> torch.optim.Optimizer:
    params = list(params)
    return _adamw(params, **(options if _are_sharded(params) and dist.get_rank() == 1 else {}))


def _without_last(params: Params) -> torch.optim.Optimizer:
    params = list(params)
    return _adamw(params[:-1] if _are_sharded(params) else params)


def _of_copies(params: Params) -> torch.optim.Optimizer:
    params = list(params)
    if _are_sharded(params):
        params = [nn.Parameter(each.detach().clone()) for each in params]
        for each in params:
            each.grad = torch.zeros_like(each)
    return _adamw(params)


def _update(name: str, cause: str, optimizer: Any, **more: Any) -> Fault:
    place = {"phase": Phase.UPDATE, "at": "up.weight", **more}
    return Fault(name, cause=cause, optimizer=optimizer, **place)


FAULTS = [
    _update("an optimizer that steps twice", TWICE, partial(_Meddling, after=_Meddling.plain)),
    _update("a rate of the sharded run alone", SETTINGS, partial(_when_sharded, lr=2e-2)),
    _update("a rate of one rank", SETTINGS, partial(_on_rank_1, lr=2e-2)),
    _update("a rate a hundredth larger on one rank", SETTINGS, partial(_on_rank_1, lr=1.01e-2)),
    _update("a rate of one rank that settings hide", BY_RANK, partial(_ByRank, lr=0.1)),
    _update(
        "betas of the sharded run alone",
        SETTINGS,
        partial(_when_sharded, betas=(0.8, 0.9)),
        phase=Phase.STATE,
        at="exp_avg of up.weight",
    ),
    _update(
        "a weight decay of the sharded run", SETTINGS, partial(_when_sharded, weight_decay=0.1)
    ),
    _update("a weight decay that settings hide", DECAY, partial(_Meddling, before=_decay)),
    _update("a step that rank 1 does not make", BY_RANK, partial(_Skipping, lr=0.1)),
    _update("state that is lost", LOST, partial(_Meddling, before=_forget)),
    _update("state that one rank loses", LOST, partial(_Meddling, before=_forget_on_rank_1)),
    _update("state that is changed", UNALIKE, partial(_Meddling, before=_stale_average)),
    _update(
        "state that is changed after the step",
        UNALIKE,
        partial(_Meddling, after=_stale_average),
        phase=Phase.STATE,
        at="exp_avg_sq of up.weight",
    ),
    _update("one element that moves further", UNALIKE, partial(_Meddling, after=_one_element)),
    _update("a parameter left out", UNCOVERED, _without_last, at="down.bias"),
    _update("an optimizer of copies", UNCOVERED, _of_copies),
    _update("norms of shards", BY_SHARD, partial(_ByShard, scale=lambda grad: grad.norm() + 1e-6)),
    _update(
        "sizes of shards", BY_SHARD, partial(_ByShard, scale=lambda grad: max(1, grad.numel()))
    ),
    _update("clipped by the shard", BY_SHARD, partial(_ClippedByShard, lr=0.1), unseen=COUPLED),
    _update("clipped more when sharded", SCALED, partial(_ClippedMore, lr=0.1), unseen=COUPLED),
    _update("clipped on one rank", BY_RANK, partial(_ClippedOnRank1, lr=0.1)),
]

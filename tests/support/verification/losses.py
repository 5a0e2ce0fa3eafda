"""Faults of batches, losses and the accumulation of gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fullshard.preflight import Phase
from fullshard.sharding import FSDPModule
from support.verification.fault import Fault, batch, is_sharded, loss, shard

BYPASSED = "a parameter read or set through .data, .grad or to_local()"
FED = "inputs that are not the batch's"
KEPT = "gradients of the step before"
LEFT_OUT = "gradients that are left out"
LOSS = "a loss function that is not the same"
SCALED = "gradients scaled by one factor"
TOKENS = "a mean over each rank's own tokens"
UNALIKE = "gradients that do not count alike"
UNREDUCED = "gradients that are not reduced"
BETWEEN = "it lies between the layers"


# -- batches and losses ---------------------------------------------------------------------------


def _unequal(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = 2 + 3 * dist.get_rank()
    inputs, targets = batch(step)
    return inputs.repeat(2, 1)[:rows], targets.repeat(2, 1)[:rows]


def _rows(given: Any) -> int:
    return len(given[0])


def _rolled(model: Any, given: Any) -> torch.Tensor:
    inputs = given[0].roll(1, 0) if is_sharded(model) else given[0]
    return loss(model, (inputs, given[1]))


def _next_batch(model: Any, given: Any) -> torch.Tensor:
    """Rank 1 gets the batch of another step, as by a loader that runs ahead."""
    if is_sharded(model) and dist.get_rank() == 1:
        given = batch(7)
    return loss(model, given)


def _multiplied(model: Any, given: Any) -> torch.Tensor:
    return loss(model, given) * (dist.get_world_size() if is_sharded(model) else 1)


def _on_rank_1(model: Any, given: Any) -> torch.Tensor:
    return loss(model, given) * (3 if is_sharded(model) and dist.get_rank() == 1 else 1)


def _backward_times(model: Any, given: Any, factor: Callable[[], float]) -> torch.Tensor:
    """The right loss, whose gradient is scaled when sharded, as by a scaler that is not undone."""
    found = loss(model, given)
    return found.detach() + (factor() if is_sharded(model) else 1.0) * (found - found.detach())


def _penalised(model: Any, given: Any) -> torch.Tensor:
    weight = model.up.weight
    own = weight.to_local() if isinstance(weight, DTensor) else weight
    penalty = own.square().mean()
    return loss(model, given) + penalty - penalty.detach()


# -- accumulation ---------------------------------------------------------------------------------


def _halves(given: Any) -> tuple[Any, Any]:
    return (given[0][:2], given[1][:2]), (given[0][2:], given[1][2:])


def _dropping(model: Any, given: Any) -> torch.Tensor:
    first, second = _halves(given)
    (0.5 * loss(model, first)).backward()
    if is_sharded(model):
        model.zero_grad()
    return 0.5 * loss(model, second)


def _twice_backward(model: Any, given: Any) -> torch.Tensor:
    first, second = _halves(given)
    for _ in range(2 if is_sharded(model) else 1):
        (0.5 * loss(model, first)).backward()
    return 0.5 * loss(model, second)


def _undivided(model: Any, given: Any) -> torch.Tensor:
    """The first micro-batch is not divided by their number."""
    first, second = _halves(given)
    ((1.0 if is_sharded(model) else 0.5) * loss(model, first)).backward()
    return 0.5 * loss(model, second)


def _unreduced(model: Any, given: Any) -> torch.Tensor:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
    return loss(model, given)


def _silent(model: Any) -> None:
    shard(model).set_requires_gradient_sync(False)


class _Keeping(torch.optim.SGD):
    """Leaves gradients as they are, when sharded."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not any(isinstance(each, DTensor) for each in self.param_groups[0]["params"]):
            super().zero_grad(set_to_none)


def _in_loss(name: str, cause: str, **program: Any) -> Fault:
    return Fault(name, Phase.LOSS, cause=cause, unseen=BETWEEN, **program)


def _in_gradient(name: str, cause: str, unseen: str = "", **program: Any) -> Fault:
    return Fault(name, Phase.GRADIENT, "up.weight", cause, unseen=unseen, **program)


def _missing(name: str, **program: Any) -> Fault:
    return Fault(name, Phase.MISSING, "up.weight", UNREDUCED, fits=True, **program)


AGAIN = "both backwards of a layer are run again"
_scaled = partial(_backward_times, factor=lambda: 1024.0)
_scaled_by_rank = partial(_backward_times, factor=lambda: 1.0 + 2 * dist.get_rank())

FAULTS = [
    _in_loss("means over unequal numbers of rows", TOKENS, batch=_unequal, tokens=_rows),
    _in_loss("inputs in another order", FED, loss=_rolled),
    _in_loss("another step's batch on one rank", FED, loss=_next_batch),
    _in_loss("a loss times the world size", LOSS, loss=_multiplied),
    _in_loss("a loss scaled on one rank", LOSS, loss=_on_rank_1),
    _in_gradient("a scaled backward", SCALED, BETWEEN, loss=_scaled),
    _in_gradient("a backward scaled on one rank", UNALIKE, BETWEEN, loss=_scaled_by_rank),
    _in_gradient("a penalty on the shard", BYPASSED, loss=_penalised, fits=True),
    _in_gradient("a first micro-batch that is dropped", LEFT_OUT, loss=_dropping),
    _in_gradient("a micro-batch that runs twice", UNALIKE, AGAIN, loss=_twice_backward),
    _in_gradient("a micro-batch that is not divided", UNALIKE, BETWEEN, loss=_undivided),
    _in_gradient("gradients that are not set to zero", KEPT, optimizer=partial(_Keeping, lr=0.1)),
    _missing("a last micro-batch without reduction", loss=_unreduced),
    _missing("gradients never reduced", shard=_silent),
]

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

__all__ = ["FAULTS"]

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


FAULTS = [
    Fault(
        name="means over unequal numbers of rows",
        phase=Phase.LOSS,
        causes=(TOKENS,),
        program={"batch": _unequal, "tokens": lambda given: len(given[0])},
        unseen=BETWEEN,
    ),
    Fault(
        name="inputs in another order",
        phase=Phase.LOSS,
        causes=(FED,),
        program={"loss": _rolled},
        unseen=BETWEEN,
    ),
    Fault(
        name="another step's batch on one rank",
        phase=Phase.LOSS,
        causes=(FED,),
        program={"loss": _next_batch},
        unseen=BETWEEN,
    ),
    Fault(
        name="a loss times the world size",
        phase=Phase.LOSS,
        causes=(LOSS,),
        program={"loss": _multiplied},
        unseen=BETWEEN,
    ),
    Fault(
        name="a loss scaled on one rank",
        phase=Phase.LOSS,
        causes=(LOSS,),
        program={"loss": _on_rank_1},
        unseen=BETWEEN,
    ),
    Fault(
        name="a scaled backward",
        phase=Phase.GRADIENT,
        at="up.weight",
        causes=(SCALED,),
        program={"loss": partial(_backward_times, factor=lambda: 1024.0)},
        unseen=BETWEEN,
    ),
    Fault(
        name="a backward scaled on one rank",
        phase=Phase.GRADIENT,
        at="up.weight",
        causes=(UNALIKE,),
        program={"loss": partial(_backward_times, factor=lambda: 1.0 + 2 * dist.get_rank())},
        unseen=BETWEEN,
    ),
    Fault(
        name="a penalty on the shard",
        phase=Phase.GRADIENT,
        at="up.weight",
        causes=(BYPASSED,),
        program={"loss": _penalised},
        fits=True,
    ),
    Fault(
        name="a first micro-batch that is dropped",
        phase=Phase.GRADIENT,
        at="up.weight",
        causes=(LEFT_OUT,),
        program={"loss": _dropping},
    ),
    Fault(
        name="a micro-batch that runs twice",
        phase=Phase.GRADIENT,
        at="up.weight",
        causes=(UNALIKE,),
        program={"loss": _twice_backward},
        unseen="both backwards of a layer are run again",
    ),
    Fault(
        name="a micro-batch that is not divided",
        phase=Phase.GRADIENT,
        at="up.weight",
        causes=(UNALIKE,),
        program={"loss": _undivided},
        unseen=BETWEEN,
    ),
    Fault(
        name="gradients that are not set to zero",
        phase=Phase.GRADIENT,
        at="up.weight",
        causes=(KEPT,),
        program={"optimizer": partial(_Keeping, lr=0.1)},
    ),
    Fault(
        name="a last micro-batch without reduction",
        phase=Phase.MISSING,
        at="up.weight",
        causes=(UNREDUCED,),
        program={"loss": _unreduced},
        fits=True,
    ),
    Fault(
        name="gradients never reduced",
        phase=Phase.MISSING,
        at="up.weight",
        causes=(UNREDUCED,),
        program={"shard": _silent},
        fits=True,
    ),
]

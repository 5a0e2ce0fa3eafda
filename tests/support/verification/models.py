"""Faults of models: random numbers, buffers, dtypes, modes, ties, what is trained, ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn

from fullshard.preflight import Phase
from fullshard.sharding import fully_shard
from support.modules import Assembled
from support.verification.fault import WIDTH, Fault, build, shard

__all__ = ["FAULTS"]

APART = "a buffer that ranks update apart"
ASKS = "code that asks for its rank"
BUILT = "values that sharding changes"
CHANGED = "a full parameter that forward changes"
DETACHED = "an output that is detached"
DTYPE = "a policy's dtype"
HOOK = "a hook on a parameter"
MODE = "train and eval mode mixed up"
OUTSIDE = "a parameter outside every group"
RANDOM = "random numbers drawn per rank"
SKIPPED = "a module that some ranks skip"
TIED = "weights that are tied in one of the models only"
TRAINED = "requires_grad that is not the same in both models"


def _counted(module: Any, x: torch.Tensor) -> torch.Tensor:
    module.seen.add_(x.detach().sum())
    return x


class Clipped(nn.Module):
    """Changes its parameter in forward, where nothing sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((9,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape: ``[..., 9]``, in and out."""
        self.scale.data.clamp_(max=1.0)
        return x * self.scale


BETWEEN: dict[str, Callable[[], nn.Module]] = {
    "random of Python": lambda: Assembled(lambda m, x: x * (1 + random.random())),
    "random of numpy": lambda: Assembled(lambda m, x: x * float(1 + numpy.random.rand())),
    "a sum": lambda: Assembled(_counted, seen=nn.Buffer(torch.zeros(()))),
    "a layer for rank 0": lambda: Assembled(
        lambda m, x: x + m.extra(x) if dist.get_rank() == 0 else x, extra=nn.Linear(9, 9)
    ),
    "a rank's factor": lambda: Assembled(lambda m, x: x * (1 + dist.get_rank())),
    "frequencies": lambda: Assembled(
        lambda m, x: x + 0 * m.freqs, freqs=nn.Buffer(torch.linspace(1.0, 2.03, 9))
    ),
    "a constant": lambda: Assembled(
        lambda m, x: x * m.scale.clone(), scale=nn.Buffer(torch.ones(9))
    ),
}
"""What a fault puts between the layers; 16 bits cannot hold the frequencies."""


def _skipping(model: Any) -> Any:
    """Skips a layer at random, as in LayerDrop."""

    def run(module: Any, x: torch.Tensor) -> torch.Tensor:
        return module.inner(x) if torch.rand(()) < 0.5 else x

    return Assembled(run, inner=model)


def _tied() -> Any:
    net = build(hidden=WIDTH)
    net.down.weight = net.up.weight
    return net


def _untied(model: Any) -> None:
    model.down.weight = nn.Parameter(model.up.weight.detach().clone())
    shard(model)


def _retied(model: Any) -> None:
    model.down.weight = model.up.weight
    fully_shard(model)


def _rounded(model: Any) -> None:
    model.between.to(torch.bfloat16)
    shard(model)


def _half_frozen() -> Any:
    net = build()
    net.up.bias.requires_grad_(False)
    return net


def _thawed(model: Any) -> None:
    model.requires_grad_(True)
    shard(model)


def _frozen(model: Any) -> None:
    model.down.bias.requires_grad_(False)
    shard(model)


def _hooked(method: str, hook: Callable[[Any], Any]) -> Any:
    net = build()
    getattr(net.up.weight, method)(hook)
    return net


def _halve(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def _changed(model: Any) -> None:
    shard(model)
    with torch.no_grad():
        model.up.weight.mul_(1.01)


def _drawn_again(model: Any) -> None:
    shard(model)
    with torch.no_grad():
        model.up.weight.to_local().normal_()


def _changed_on_rank_1(model: Any) -> None:
    shard(model)
    with torch.no_grad():
        model.up.weight.to_local().mul_(1 + dist.get_rank())


def _detached(model: Any) -> None:
    model.up.register_forward_hook(lambda module, inputs, output: output.detach())
    shard(model)


def _evaluating(model: Any) -> None:
    shard(model).eval()


def _reset_on_rank_1(model: Any) -> None:
    shard(model)
    if dist.get_rank() == 1:
        model.between.register_forward_hook(lambda module, inputs, output: _zero(module.scale))


def _zero(scale: torch.Tensor) -> None:
    scale.mul_(1.5)


FAULTS = [
    Fault(
        name="dropout",
        phase=Phase.LOSS,
        at="between",
        causes=(RANDOM,),
        program={"build_model": lambda: build(lambda: nn.Dropout(0.5))},
    ),
    Fault(
        name="random of Python",
        phase=Phase.LOSS,
        at="between",
        causes=(RANDOM,),
        program={"build_model": lambda: build(BETWEEN["random of Python"])},
    ),
    Fault(
        name="random of numpy",
        phase=Phase.LOSS,
        at="between",
        causes=(RANDOM,),
        program={"build_model": lambda: build(BETWEEN["random of numpy"])},
    ),
    Fault(
        name="a layer that all ranks skip at random",
        phase=Phase.LOSS,
        at="between",
        causes=(RANDOM,),
        program={"build_model": lambda: build(lambda: _skipping(nn.Linear(9, 9)))},
    ),
    Fault(
        name="batch statistics",
        phase=Phase.BUFFER,
        at="between.running_mean",
        causes=(APART,),
        program={"build_model": lambda: build(lambda: nn.BatchNorm1d(9))},
    ),
    Fault(
        name="a sum in a buffer",
        phase=Phase.BUFFER,
        at="between.seen",
        causes=(APART,),
        program={"build_model": lambda: build(BETWEEN["a sum"])},
    ),
    Fault(
        name="a buffer that rank 1 alone changes",
        phase=Phase.BUFFER,
        at="between.scale",
        causes=(APART,),
        program={
            "build_model": lambda: build(BETWEEN["a constant"]),
            "shard": _reset_on_rank_1,
        },
    ),
    Fault(
        name="a buffer in 16 bits",
        phase=Phase.BUFFER,
        at="between.freqs",
        causes=(DTYPE,),
        program={"build_model": lambda: build(BETWEEN["frequencies"]), "shard": _rounded},
    ),
    Fault(
        name="evaluated when sharded",
        phase=Phase.LOSS,
        at="between",
        causes=(MODE,),
        program={
            "build_model": lambda: build(lambda: nn.Dropout(0.5)),
            "shard": _evaluating,
            "aligned_seeds": True,
        },
        unseen="each layer is run again in its mode",
    ),
    Fault(
        name="a parameter that is left out",
        phase=Phase.GRADIENT,
        at="down.weight",
        causes=(OUTSIDE,),
        program={"shard": lambda model: fully_shard(model, ignored_params={model.down.weight})},
    ),
    Fault(
        name="a tensor's hook",
        phase=Phase.GRADIENT,
        at="up.weight",
        causes=(HOOK,),
        program={"build_model": lambda: _hooked("register_hook", lambda grad: 2 * grad)},
    ),
    Fault(
        name="a hook after accumulation",
        phase=Phase.GRADIENT,
        at="up.weight",
        causes=(HOOK,),
        program={"build_model": lambda: _hooked("register_post_accumulate_grad_hook", _halve)},
    ),
    Fault(
        name="a parameter changed through data",
        phase=Phase.UPDATE,
        at="between.scale",
        causes=(CHANGED,),
        program={"build_model": lambda: build(Clipped)},
    ),
    Fault(
        name="a module for one rank",
        phase=Phase.LOSS,
        at="between",
        causes=(SKIPPED,),
        program={"build_model": lambda: build(BETWEEN["a layer for rank 0"])},
    ),
    Fault(
        name="a factor by rank",
        phase=Phase.LOSS,
        at="between",
        causes=(ASKS,),
        program={"build_model": lambda: build(BETWEEN["a rank's factor"])},
    ),
    Fault(
        name="values changed after sharding",
        phase=Phase.BUILD,
        at="up.weight",
        causes=(BUILT,),
        program={"shard": _changed},
    ),
    Fault(
        name="values drawn again after sharding",
        phase=Phase.BUILD,
        at="up.weight",
        causes=(BUILT,),
        program={"shard": _drawn_again},
    ),
    Fault(
        name="values that one rank changes",
        phase=Phase.BUILD,
        at="up.weight",
        causes=(BUILT,),
        program={"shard": _changed_on_rank_1},
    ),
    Fault(
        name="frozen by sharding",
        phase=Phase.MISSING,
        at="down.bias",
        causes=(TRAINED,),
        program={"shard": _frozen},
    ),
    Fault(
        name="trained after sharding",
        phase=Phase.MISSING,
        at="up.bias",
        causes=(TRAINED,),
        program={"build_model": _half_frozen, "shard": _thawed},
    ),
    Fault(
        name="frozen after sharding",
        phase=Phase.MISSING,
        at="up.bias",
        causes=(TRAINED,),
        program={"shard": lambda model: shard(model).up.bias.requires_grad_(False)},
    ),
    Fault(
        name="a tie that is broken",
        phase=Phase.BUILD,
        at="down.weight",
        causes=(TIED,),
        program={"build_model": _tied, "shard": _untied},
    ),
    Fault(
        name="a tie that is new",
        phase=Phase.BUILD,
        at="down.weight",
        causes=(TIED,),
        program={"build_model": lambda: build(hidden=WIDTH), "shard": _retied},
    ),
    Fault(
        name="detached by sharding",
        phase=Phase.MISSING,
        at="up.weight",
        causes=(DETACHED,),
        program={"shard": _detached},
    ),
]

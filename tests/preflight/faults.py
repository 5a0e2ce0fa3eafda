"""Small faults to plant in a training program, each with what ``verify`` must say of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.comm import DefaultReduceScatter
from fullshard.policies import MixedPrecisionPolicy
from fullshard.preflight import Phase
from fullshard.sharding import FSDPModule, fully_shard
from support.modules import Assembled, in_turn

__all__ = ["FAULTS", "Fault", "batch", "build", "loss", "shard"]

WIDTH = 6


def build(between: Callable[[], nn.Module] = nn.Tanh, width: int = WIDTH, hidden: int = 9) -> Any:
    """Two layers and what a fault puts between them."""
    return in_turn(up=nn.Linear(width, hidden), between=between(), down=nn.Linear(hidden, width))


def shard(model: Any, **arguments: Any) -> Any:
    """Each layer, and the rest."""
    fully_shard(model.up, **arguments)
    fully_shard(model.down, **arguments)
    return fully_shard(model, **arguments)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's inputs and targets."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    inputs, targets = torch.randn(2, 4, WIDTH, generator=generator).unbind()
    return inputs, targets


def loss(model: nn.Module, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The mean of squares."""
    inputs, targets = given
    return (model(inputs) - targets).square().mean()


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault; what is not given is as it should be.

    Attributes:
        name: what was planted.
        phase: where it must be seen first.
        at: what the first difference must name.
        cause: the name of a cause that must be given; empty: none fits.
        program: what differs from a program without faults.
    """

    name: str
    phase: Phase
    at: str = ""
    cause: str = ""
    program: dict[str, Any] = field(default_factory=dict)


def _counted(module: Any, x: torch.Tensor) -> torch.Tensor:
    module.seen.add_(x.detach().sum())
    return x


class Clipped(nn.Module):
    """Changes its parameter in forward, where nothing sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((9,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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
}
"""What a fault puts between the layers; 16 bits cannot hold the frequencies."""


def _tied() -> Any:
    net = build(hidden=WIDTH)
    net.down.weight = net.up.weight
    return net


def _untied(model: Any) -> None:
    model.down.weight = nn.Parameter(model.up.weight.detach().clone())
    shard(model)


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


def _penalised(model: Any, given: Any) -> torch.Tensor:
    weight = model.up.weight
    own = weight.to_local() if isinstance(weight, DTensor) else weight
    penalty = own.square().mean()
    return loss(model, given) + penalty - penalty.detach()


def _dropping(model: Any, given: Any) -> torch.Tensor:
    (0.5 * loss(model, (given[0][:2], given[1][:2]))).backward()
    if isinstance(model, FSDPModule):
        for param in model.parameters():
            param.grad = None
    return 0.5 * loss(model, (given[0][2:], given[1][2:]))


def _unreduced(model: Any, given: Any) -> torch.Tensor:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
    return loss(model, given)


def _other_rate(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    params = list(params)
    is_sharded = any(isinstance(each, DTensor) for each in params)
    return torch.optim.SGD(params, lr=0.1 * (1 + is_sharded))


def _hooked(method: str, hook: Callable[[Any], Any]) -> Any:
    net = build()
    getattr(net.up.weight, method)(hook)
    return net


def _halve(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def _divided(model: Any, factor: float) -> None:
    shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)


def _changed(model: Any) -> None:
    shard(model)
    with torch.no_grad():
        model.up.weight.mul_(1.01)


def _frozen(model: Any) -> None:
    model.down.bias.requires_grad_(False)
    shard(model)


def _silent(model: Any) -> None:
    shard(model).set_requires_gradient_sync(False)


class _OwnPart(DefaultReduceScatter):
    """Forgets the other ranks."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


def _alone(model: Any) -> None:
    shard(model)
    model.up.set_custom_reduce_scatter(_OwnPart())


class ScaledByShard(torch.optim.Optimizer):
    """Scales by something of what it holds: of a shard, the shard's."""

    def __init__(
        self, params: Iterable[nn.Parameter], scale: Callable[[torch.Tensor], Any]
    ) -> None:
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


def _unequal(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = 2 + 3 * dist.get_rank()
    inputs, targets = batch(step)
    return inputs.repeat(2, 1)[:rows], targets.repeat(2, 1)[:rows]


def _detached(model: Any) -> None:
    model.up.register_forward_hook(lambda module, inputs, output: output.detach())
    shard(model)


BYPASSED = "a parameter read or set through .data, .grad or to_local()"
TRAINED = "requires_grad that is not the same in both models"
UNREDUCED = "gradients that are not reduced"
TIED = "weights that are tied in one of the models only"
RANDOM = "random numbers drawn per rank"
APART = "a buffer that ranks update apart"
SCALED = "gradients scaled by one factor"
HOOK = "a hook on a parameter"
DTYPE = "a policy's dtype"
OPTIMIZER = "an optimizer that decides by the shard"
HALF = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)

FAULTS = [
    Fault(
        name="dropout",
        phase=Phase.LOSS,
        at="between",
        cause=RANDOM,
        program={"build_model": lambda: build(lambda: nn.Dropout(0.5))},
    ),
    Fault(
        name="random of Python",
        phase=Phase.LOSS,
        at="between",
        cause=RANDOM,
        program={"build_model": lambda: build(BETWEEN["random of Python"])},
    ),
    Fault(
        name="batch statistics",
        phase=Phase.BUFFER,
        at="between.running_mean",
        cause=APART,
        program={"build_model": lambda: build(lambda: nn.BatchNorm1d(9))},
    ),
    Fault(
        name="a sum in a buffer",
        phase=Phase.BUFFER,
        at="between.seen",
        cause=APART,
        program={"build_model": lambda: build(BETWEEN["a sum"])},
    ),
    Fault(
        name="means over unequal numbers of rows",
        phase=Phase.LOSS,
        cause="a mean over each rank's own tokens",
        program={"batch": _unequal, "tokens": lambda given: len(given[0])},
    ),
    Fault(
        name="gradients that are summed",
        phase=Phase.GRADIENT,
        at="up.weight",
        cause=SCALED,
        program={"shard": lambda model: _divided(model, 1.0)},
    ),
    Fault(
        name="gradients divided twice",
        phase=Phase.GRADIENT,
        at="up.weight",
        cause=SCALED,
        program={"shard": lambda model: _divided(model, 4.0)},
    ),
    Fault(
        name="a parameter that is left out",
        phase=Phase.GRADIENT,
        at="down.weight",
        cause="a parameter outside every group",
        program={"shard": lambda model: fully_shard(model, ignored_params={model.down.weight})},
    ),
    Fault(
        name="a tensor's hook",
        phase=Phase.GRADIENT,
        at="up.weight",
        cause=HOOK,
        program={"build_model": lambda: _hooked("register_hook", lambda grad: 2 * grad)},
    ),
    Fault(
        name="a hook after accumulation",
        phase=Phase.GRADIENT,
        at="up.weight",
        cause=HOOK,
        program={"build_model": lambda: _hooked("register_post_accumulate_grad_hook", _halve)},
    ),
    Fault(
        name="a parameter changed through data",
        phase=Phase.UPDATE,
        at="between.scale",
        cause=BYPASSED,
        program={"build_model": lambda: build(Clipped)},
    ),
    Fault(
        name="a module for one rank",
        phase=Phase.LOSS,
        at="between",
        cause="a module that some ranks skip",
        program={"build_model": lambda: build(BETWEEN["a layer for rank 0"])},
    ),
    Fault(
        name="a factor by rank",
        phase=Phase.LOSS,
        program={"build_model": lambda: build(BETWEEN["a rank's factor"])},
    ),
    Fault(
        name="reduced in 16 bits",
        phase=Phase.GRADIENT,
        cause=DTYPE,
        program={"shard": lambda model: shard(model, mp_policy=HALF)},
    ),
    Fault(
        name="norms of shards",
        phase=Phase.UPDATE,
        at="up.weight",
        cause=OPTIMIZER,
        program={"optimizer": partial(ScaledByShard, scale=lambda grad: grad.norm() + 1e-6)},
    ),
    Fault(
        name="sizes of shards",
        phase=Phase.UPDATE,
        at="up.weight",
        cause=OPTIMIZER,
        program={"optimizer": partial(ScaledByShard, scale=lambda grad: max(1, grad.numel()))},
    ),
    Fault(
        name="values changed after sharding",
        phase=Phase.BUILD,
        at="up.weight",
        program={"shard": _changed},
    ),
    Fault(
        name="frozen by sharding",
        phase=Phase.MISSING,
        at="down.bias",
        cause=TRAINED,
        program={"shard": _frozen},
    ),
    Fault(
        name="trained after sharding",
        phase=Phase.MISSING,
        at="up.bias",
        cause=TRAINED,
        program={"build_model": _half_frozen, "shard": _thawed},
    ),
    Fault(
        name="frozen after sharding",
        phase=Phase.MISSING,
        at="up.bias",
        cause=TRAINED,
        program={"shard": lambda model: shard(model).up.bias.requires_grad_(False)},
    ),
    Fault(
        name="a tie that is broken",
        phase=Phase.BUILD,
        at="down.weight",
        cause=TIED,
        program={"build_model": _tied, "shard": _untied},
    ),
    Fault(
        name="a buffer in 16 bits",
        phase=Phase.BUFFER,
        at="between.freqs",
        cause=DTYPE,
        program={
            "build_model": lambda: build(BETWEEN["frequencies"]),
            "shard": _rounded,
        },
    ),
    Fault(
        name="random of numpy",
        phase=Phase.LOSS,
        at="between",
        cause=RANDOM,
        program={"build_model": lambda: build(BETWEEN["random of numpy"])},
    ),
    Fault(
        name="a penalty on the shard",
        phase=Phase.GRADIENT,
        cause=BYPASSED,
        program={"loss": _penalised},
    ),
    Fault(
        name="a first micro-batch that is dropped",
        phase=Phase.GRADIENT,
        at="up.weight",
        cause=BYPASSED,
        program={"loss": _dropping},
    ),
    Fault(
        name="a last micro-batch without reduction",
        phase=Phase.MISSING,
        at="up.weight",
        cause=UNREDUCED,
        program={"loss": _unreduced},
    ),
    Fault(
        name="a rate of the sharded run alone",
        phase=Phase.UPDATE,
        at="up.weight",
        cause=OPTIMIZER,
        program={"optimizer": _other_rate},
    ),
    Fault(
        name="gradients never reduced",
        phase=Phase.MISSING,
        at="up.weight",
        cause=UNREDUCED,
        program={"shard": _silent},
    ),
    Fault(name="one group alone", phase=Phase.GRADIENT, at="up.weight", program={"shard": _alone}),
    Fault(
        name="detached by sharding",
        phase=Phase.MISSING,
        at="up.weight",
        cause=UNREDUCED,
        program={"shard": _detached},
    ),
]

"""Faults of models: random numbers, buffers, dtypes, modes, ties, what is trained, ranks."""

from __future__ import annotations

import random
import warnings
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


def _hooked(name: str, method: str, hook: Callable[[Any], Any]) -> Fault:
    """A fault of a hook that is registered on a parameter by ``method``."""

    def build_model() -> Any:
        net = build()
        getattr(net.up.weight, method)(hook)
        return net

    def shard_it(model: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "hooks on the gradients of weight are lost")
            shard(model)

    return Fault(name, Phase.GRADIENT, "up.weight", HOOK, build_model=build_model, shard=shard_it)


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
    forward = model.up.forward
    model.up.forward = lambda x: forward(x).detach()
    shard(model)


def _evaluating(model: Any) -> None:
    shard(model).eval()


def _reset_on_rank_1(model: Any) -> None:
    shard(model)
    if dist.get_rank() == 1:
        model.between.register_forward_hook(lambda module, inputs, output: _zero(module.scale))


def _zero(scale: torch.Tensor) -> None:
    scale.mul_(1.5)


def _between(
    name: str, phase: Phase, at: str, cause: str, make: Callable[[], nn.Module], **more: Any
) -> Fault:
    """A fault of the module that ``make`` makes, which runs between the layers."""
    return Fault(name, phase, at, cause, build_model=lambda: build(make), **more)


def _in_loss(name: str, cause: str, make: Callable[[], nn.Module], **more: Any) -> Fault:
    return _between(name, Phase.LOSS, "between", cause, make, **more)


def _run(function: Callable[[Any, torch.Tensor], torch.Tensor], **parts: Any) -> Any:
    return lambda: Assembled(function, **parts)


def _with_buffer(
    name: str, at: str, cause: str, function: Any, value: torch.Tensor, **more: Any
) -> Fault:
    """A fault of a buffer between the layers, which ``function`` uses."""
    make = _run(function, **{at: nn.Buffer(value)})
    return _between(name, Phase.BUFFER, f"between.{at}", cause, make, **more)


def _built(name: str, shard: Callable[[Any], object]) -> Fault:
    return Fault(name, Phase.BUILD, "up.weight", BUILT, shard=shard)


def _missing(name: str, at: str, cause: str, **program: Any) -> Fault:
    return Fault(name, Phase.MISSING, at, cause, **program)


_FREQUENCIES = torch.linspace(1.0, 2.03, 9)  # 16 bits cannot hold them

FAULTS = [
    _in_loss("dropout", RANDOM, lambda: nn.Dropout(0.5)),
    _in_loss("random of Python", RANDOM, _run(lambda m, x: x * (1 + random.random()))),
    _in_loss("random of numpy", RANDOM, _run(lambda m, x: x * float(1 + numpy.random.rand()))),
    _in_loss("a layer that all ranks skip at random", RANDOM, lambda: _skipping(nn.Linear(9, 9))),
    _between(
        "batch statistics",
        Phase.BUFFER,
        "between.running_mean",
        APART,
        lambda: nn.BatchNorm1d(9),
    ),
    _with_buffer("a sum in a buffer", "seen", APART, _counted, torch.zeros(())),
    _with_buffer(
        "a buffer that rank 1 alone changes",
        "scale",
        APART,
        lambda m, x: x * m.scale.clone(),
        torch.ones(9),
        shard=_reset_on_rank_1,
    ),
    _with_buffer(
        "a buffer in 16 bits",
        "freqs",
        DTYPE,
        lambda m, x: x + 0 * m.freqs,
        _FREQUENCIES,
        shard=_rounded,
    ),
    _in_loss(
        "evaluated when sharded",
        MODE,
        lambda: nn.Dropout(0.5),
        shard=_evaluating,
        aligned_seeds=True,
        unseen="each layer is run again in its mode",
    ),
    Fault(
        "a parameter that is left out",
        Phase.GRADIENT,
        "down.weight",
        OUTSIDE,
        shard=lambda model: fully_shard(model, ignored_params={model.down.weight}),
    ),
    _hooked("a tensor's hook", "register_hook", lambda grad: 2 * grad),
    _hooked("a hook after accumulation", "register_post_accumulate_grad_hook", _halve),
    _between("a parameter changed through data", Phase.UPDATE, "between.scale", CHANGED, Clipped),
    _in_loss(
        "a module for one rank",
        SKIPPED,
        lambda: Assembled(
            lambda m, x: x + m.extra(x) if dist.get_rank() == 0 else x, extra=nn.Linear(9, 9)
        ),
    ),
    _in_loss("a factor by rank", ASKS, _run(lambda m, x: x * (1 + dist.get_rank()))),
    _built("values changed after sharding", _changed),
    _built("values drawn again after sharding", _drawn_again),
    _built("values that one rank changes", _changed_on_rank_1),
    _missing("frozen by sharding", "down.bias", TRAINED, shard=_frozen),
    _missing("trained after sharding", "up.bias", TRAINED, build_model=_half_frozen, shard=_thawed),
    _missing(
        "frozen after sharding",
        "up.bias",
        TRAINED,
        shard=lambda model: shard(model).up.bias.requires_grad_(False),
    ),
    Fault(
        "a tie that is broken", Phase.BUILD, "down.weight", TIED, build_model=_tied, shard=_untied
    ),
    Fault(
        "a tie that is new",
        Phase.BUILD,
        "down.weight",
        TIED,
        build_model=lambda: build(hidden=WIDTH),
        shard=_retied,
    ),
    _missing(
        "detached by sharding",
        "up.weight",
        DETACHED,
        shard=_detached,
        by_layer=Phase.MISSING,
    ),
]

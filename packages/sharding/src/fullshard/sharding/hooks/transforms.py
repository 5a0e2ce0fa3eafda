"""Modules inside a transform of ``torch.func``, or inside a level of forward-mode differentiation.

Owns the node by which such a module's outputs, inputs, tangents and gradients tell that a backward
has come. [Note: transforms] Inside a transform a tensor is a stack of wrappers, one per level, each
with a graph of its own; an output may say that it requires no gradient and yet carry a graph of the
parameters at a lower level, or in its tangent. An ``autograd.Function`` is what torch takes through
all levels, and its ``jvp`` through tangents, so a node of ours stands in every graph. A backward at
any level needs full parameters; only one at the lowest level gives them gradients. Tangents and
values have separate graphs, so no event shows that a backward is past a module: it ends all at its
end.

The engine's own work, on plain tensors, is done with transforms switched off; see
``outside_transforms``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch

from fullshard.comm.spi import named_range
from fullshard.sharding.base.compat import (
    functorch_is_active,
    is_legacy_batched,
    untraced,
    without_functorch,
)
from fullshard.sharding.base.tensors import map_tensors, with_attributes_of

__all__ = ["outside_transforms", "refuse_tracing", "set_apart", "watch"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Hook: TypeAlias = Callable[[], object]
"""Begins the backward of a forward pass."""


def outside_transforms(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return ``function``, which runs as if no transform of ``torch.func`` did."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not functorch_is_active():
            return function(*args, **kwargs)
        with without_functorch():
            return function(*args, **kwargs)

    return run


@contextmanager
def set_apart(label: str, name: str) -> Iterator[None]:
    """A context for what is done in backward: outside of transforms, and a range of a profile."""
    with without_functorch(), named_range(label, name):
        yield


class _WatchedIdentity(torch.autograd.Function):
    """The identity: the gradient that comes through it begins the backward of a forward pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(hook: _Hook, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.hook = inputs[0]

    @staticmethod
    @untraced
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        ctx.hook()
        return None, _watched(ctx.hook, grad) if torch.is_grad_enabled() else grad

    @staticmethod
    @untraced
    def jvp(ctx: Any, _: object, tangent: torch.Tensor) -> torch.Tensor:
        return _watched(ctx.hook, tangent)


def _watched(hook: _Hook, tensor: torch.Tensor) -> torch.Tensor:
    if is_legacy_batched(tensor):
        raise RuntimeError(
            "torch.autograd.functional with vectorize=True hides from a sharded module that its "
            "tangents, or the gradients of its inputs, may have a backward; use torch.func.jacrev, "
            "jacfwd or hessian, or vectorize=False"
        )
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    watched: torch.Tensor = _WatchedIdentity.apply(hook, tensor)  # type: ignore[no-untyped-call]  # torch: untyped
    return watched


def watch(hook: _Hook, value: Any, *, copy: bool = False) -> Any:
    """Return a module's inputs or outputs, or gradients of those, whose backward calls ``hook``.

    ``copy``: as copies. An input that an autograd function returns unchanged must not be changed in
    place, but a module's outputs may be.
    """
    if not copy:
        return map_tensors(partial(_watched, hook), value)
    return map_tensors(
        lambda tensor: with_attributes_of(tensor, _watched(hook, tensor).clone()), value
    )


def refuse_tracing(name: str) -> None:
    """Raise if a graph is being traced, in which parameters would be constants.

    Raises:
        RuntimeError: naming the module and what to use.
    """
    tracer = sys.modules.get("torch.fx.experimental.proxy_tensor")  # not imported: not in use
    if tracer is not None and tracer.get_proxy_mode() is not None:
        raise RuntimeError(
            f"{name} was called while torch.func.linearize or make_fx traces a graph, which keeps "
            "full parameters as constants, but they are freed when the module's forward ends; use "
            "torch.func.jvp for each tangent"
        )

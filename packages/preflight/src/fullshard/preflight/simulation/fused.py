"""Operators that are one kernel on an accelerator, and several on the CPU.

Owns what torch chooses on CUDA for them: RMSNorm, dropout, a softmax that also casts, and attention
with dropout. A plan runs on tensors of the CPU without data. There ``torch.rms_norm``, for example,
is nine operators with results in float32, of which autograd saves several. On CUDA it saves its
input and a number per row. Who calls an operator does not matter here: its name in torch's
dispatcher gets another implementation while a plan runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch

from fullshard.preflight.compat import is_fake, operators_replaced
from fullshard.sharding.spi import functorch_is_active, is_plain

__all__ = ["fused_as_on_accelerators"]

_HALVES = (torch.float16, torch.bfloat16)


@contextmanager
def fused_as_on_accelerators() -> Iterator[None]:
    """Inside the ``with`` block these operators run on the CPU as one kernel each.

    Inputs for which CUDA has no such kernel, tensors of subclasses, and transforms of
    ``torch.func`` take the CPU's own way.
    """
    replaced: dict[str, Callable[..., Any]] = {
        "rms_norm": _rms_norm,
        "dropout": _dropout,
        "softmax.int": partial(_normalised, False),
        "log_softmax.int": partial(_normalised, True),
        "scaled_dot_product_attention": _attention,
    }
    with operators_replaced(replaced):
        yield


def _rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    mixed = weight is not None and weight.dtype is not input.dtype  # CUDA's kernel takes one dtype
    if mixed or not _are_plain(input, weight):
        ordinary = torch.ops.aten.rms_norm.default.decompose
        return cast("torch.Tensor", ordinary(input, normalized_shape, weight, eps))
    least = torch.finfo(torch.float32 if input.dtype in _HALVES else input.dtype).eps
    apply: Any = _RMSNorm.apply
    width = math.prod(normalized_shape)
    return cast("torch.Tensor", apply(input, weight, width, least if eps is None else eps))


class _RMSNorm(torch.autograd.Function):
    """``torch.rms_norm`` by two operators, one for each direction."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, width: int, eps: float
    ) -> torch.Tensor:
        out, scales = _rms_norm_forward(input, weight, width, eps)
        ctx.save_for_backward(input, scales, weight)
        ctx.given = width, eps
        return cast("torch.Tensor", out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        input, scales, weight = ctx.saved_tensors
        width, eps = ctx.given
        if torch.is_grad_enabled():  # a penalty on the gradient: this has a backward, too
            found = _rms_gradients(grads[0], input, _scales(input, width, eps), weight, width)
        else:
            found = _rms_norm_backward(grads[0], input, scales, weight, width)
        return found[0], None if weight is None else found[1], None, None


def _scales(input: torch.Tensor, width: int, eps: float) -> torch.Tensor:
    """Return what each row is multiplied by, ``[rows, 1]`` float32."""
    return input.reshape(-1, width).float().square().mean(1, keepdim=True).add(eps).rsqrt()


def _rms_gradients(
    grad: torch.Tensor,
    input: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor | None,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the input and of the weight; an empty one without a weight."""
    rows, given = input.reshape(-1, width).float() * scales, grad.reshape(-1, width).float()
    grad_weight = (given * rows).sum(0)
    if weight is not None:
        given = given * weight.reshape(-1).float()
    found = (given - rows * (given * rows).mean(1, keepdim=True)) * scales
    found = found.to(input.dtype).reshape(input.shape)
    if weight is None:
        return found, input.new_empty(0)
    return found, grad_weight.to(weight.dtype).reshape(weight.shape)


@torch.library.custom_op("fullshard::rms_norm", mutates_args=())
def _rms_norm_forward(
    input: torch.Tensor, weight: torch.Tensor | None, width: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result, and what each row was multiplied by."""
    scales = _scales(input, width, eps)
    out = input.reshape(-1, width).float() * scales
    if weight is not None:
        out = out * weight.reshape(-1).float()
    return out.to(input.dtype).reshape(input.shape), scales


_rms_norm_forward.register_fake(
    lambda input, weight, width, eps: (
        torch.empty_like(input),
        input.new_empty((input.numel() // max(width, 1), 1), dtype=torch.float32),
    )
)
_rms_norm_backward = torch.library.custom_op(
    "fullshard::rms_norm_backward", _rms_gradients, mutates_args=()
)
_rms_norm_backward.register_fake(
    lambda grad, input, scales, weight, width: (
        torch.empty_like(input),
        input.new_empty(0) if weight is None else torch.empty_like(weight),
    )
)


def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Drop elements, with a mask of one byte per element."""
    if not (train and 0 < p < 1 and input.numel() and _are_plain(input)):
        return cast("torch.Tensor", torch.ops.aten.dropout.default.decompose(input, p, train))
    return torch.native_dropout(input, p, train)[0]


def _normalised(
    log: bool, input: torch.Tensor, dim: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Cast and normalise at once, as for attention in float32 that is written out."""
    if not (dtype is torch.float32 and input.dtype in _HALVES and _are_plain(input)):
        ordinary = torch.ops.aten.log_softmax.int if log else torch.ops.aten.softmax.int
        return cast("torch.Tensor", ordinary.decompose(input, dim, dtype))
    apply: Any = _CastSoftmax.apply
    return cast("torch.Tensor", apply(input, dim, log))


class _CastSoftmax(torch.autograd.Function):
    """A softmax in float32 of a narrower input: it saves its result alone."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, dim: int, log: bool) -> torch.Tensor:
        out = cast("torch.Tensor", _cast_softmax(input, dim, log))
        ctx.save_for_backward(out)
        ctx.given = dim, log, input.dtype
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        backward = _softmax_gradient if torch.is_grad_enabled() else _cast_softmax_backward
        return backward(grads[0], ctx.saved_tensors[0], *ctx.given), None, None


def _softmax_gradient(
    grad: torch.Tensor, out: torch.Tensor, dim: int, log: bool, dtype: torch.dtype
) -> torch.Tensor:
    """Return the gradient of the input, in its dtype."""
    if log:
        found = grad - out.exp() * grad.sum(dim, keepdim=True)
    else:
        found = out * (grad - (grad * out).sum(dim, keepdim=True))
    return found.to(dtype)


@torch.library.custom_op("fullshard::cast_softmax", mutates_args=())
def _cast_softmax(input: torch.Tensor, dim: int, log: bool) -> torch.Tensor:
    """Return the softmax of the input in float32, or its logarithm."""
    wide = input.float()
    return wide.log_softmax(dim) if log else wide.softmax(dim)


_cast_softmax.register_fake(lambda input, dim, log: torch.empty_like(input, dtype=torch.float32))
_cast_softmax_backward = torch.library.custom_op(
    "fullshard::cast_softmax_backward", _softmax_gradient, mutates_args=()
)
_cast_softmax_backward.register_fake(
    lambda grad, out, dim, log, dtype: torch.empty_like(out, dtype=dtype)
)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attend, with dropout in the fused kernel: that of the CPU has none, and equal work."""
    ordinary = torch.ops.aten.scaled_dot_product_attention.default.decompose
    if _are_plain(query, key, value):
        dropout_p = 0.0
    options = {"scale": scale, "enable_gqa": enable_gqa}
    found = ordinary(query, key, value, attn_mask, dropout_p, is_causal, **options)
    return cast("torch.Tensor", found)


def _are_plain(*tensors: torch.Tensor | None) -> bool:
    """Whether the operators here take the tensors: no subclass, and outside of transforms."""
    plain = all(each is None or is_plain(each) or is_fake(each) for each in tensors)
    return plain and not functorch_is_active()

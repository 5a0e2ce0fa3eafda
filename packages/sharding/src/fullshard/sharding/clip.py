"""The norm of all gradients, and clipping by it: ``clip_grad_norm_`` and ``grad_norm``.

Owns the arithmetic over local shards. Each rank adds its own, one all-reduce adds the ranks, and
nothing waits for the device. Which ranks, and how often a part counts, is ``span``'s affair.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from fullshard.comm import all_reduce_numbers
from fullshard.sharding.compat import foreach_norm, foreach_scale_, local_shard, spec_of
from fullshard.sharding.places import owner_of
from fullshard.sharding.span import Span, span_of

__all__ = ["clip_grad_norm_", "grad_norm"]

_NAME = "the norm of gradients"
_EPSILON = 1e-6  # torch's: a norm of 0 must not divide

_Parameters = nn.Module | torch.Tensor | Iterable[torch.Tensor]


@torch.no_grad()
def clip_grad_norm_(  # torch's arguments; what is ours comes last
    parameters: _Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Returns the norm of all gradients together, after scaling them so that it is ``max_norm``.

    Gradients with a smaller norm stay as they are. Takes what
    ``torch.nn.utils.clip_grad_norm_`` takes, and a module. One all-reduce, whatever the meshes;
    every rank that holds a part of the parameters calls it. It does not wait for the device, unless
    ``error_if_nonfinite`` asks for the value.

    Args:
        parameters: a module, a parameter or several; each counts once. Parameters that
            ``fully_shard`` replaced, or that are unsharded now, stand for their sharded ones.
        max_norm: the largest norm that is left alone.
        norm_type: the p of the p-norm, more than 0; ``math.inf`` for the largest absolute value.
        error_if_nonfinite: raise if the norm is infinite or not a number.
        foreach: one fused kernel per device and dtype (None, True) or one per gradient (False).
        process_group: all ranks of the model, where its parameters' meshes are only a part: the
            stages of a pipeline. None: the ranks of those meshes.

    Returns:
        The norm before clipping, equal on all ranks: a plain 0-d tensor, float64 if a parameter is,
        else float32. Sums are float64 over norms taken in float32 for 16-bit gradients.

    Raises:
        TypeError: if ``parameters`` is or holds something that is no tensor.
        ValueError: if ``norm_type`` is not positive, or ``process_group`` lacks ranks.
        RuntimeError: on every rank, if the norm is not finite and ``error_if_nonfinite``.
    """
    params = _parameters_of(parameters)
    max_norm = float(max_norm)
    total = _total(params, norm_type, foreach is not False, process_group)
    if error_if_nonfinite and not math.isfinite(total.item()):
        raise RuntimeError(
            f"the gradients' norm of order {float(norm_type)} is {total.item()}, so they cannot be "
            "clipped; skip this step on every rank, or pass error_if_nonfinite=False to scale them "
            "by it all the same"
        )
    scale = (max_norm / (total + _EPSILON)).clamp_(max=1.0)
    gradients = [local_shard(g) if isinstance(g, DTensor) else g for g in _gradients_of(params)]
    for same in _by_device_and_dtype(gradients):
        there = scale.to(same[0].device)
        if foreach is False:
            for gradient in same:
                gradient.mul_(there)
        else:
            foreach_scale_(same, there)
    return total


@torch.no_grad()
def grad_norm(
    parameters: _Parameters,
    norm_type: float = 2.0,
    *,
    foreach: bool | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Returns the norm of all gradients together, and changes none.

    Arguments, result and errors are those of ``clip_grad_norm_``.
    """
    return _total(_parameters_of(parameters), norm_type, foreach is not False, process_group)


def _parameters_of(parameters: _Parameters) -> list[torch.Tensor]:
    """Returns the parameters whose gradients the optimizer sees, each once."""
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, torch.Tensor):
        parameters = (parameters,)
    found: dict[int, torch.Tensor] = {}
    for param in parameters:
        if not isinstance(param, torch.Tensor):
            raise TypeError(
                f"parameters is or holds a {type(param).__name__}; pass a module, or its "
                "parameters()"
            )
        owner = owner_of(param)
        stands_for = param if owner is None else owner.param.sharded
        found[id(stands_for)] = stands_for
    return list(found.values())


def _gradients_of(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [param.grad for param in params if param.grad is not None]


# -- the norm -------------------------------------------------------------------------------------


def _total(
    params: Sequence[torch.Tensor],
    norm_type: float,
    foreach: bool,
    process_group: dist.ProcessGroup | None,
) -> torch.Tensor:
    order = float(norm_type)
    if not order > 0:
        raise ValueError(f"norm_type is {norm_type}; pass a number above 0, or math.inf")
    if not params:
        return torch.tensor(0.0)
    span = span_of(params, process_group)
    norms = _local_norms(params, span, order, foreach)
    total = _largest(norms, span) if math.isinf(order) else _sum(norms, span).pow_(1 / order)
    double = any(param.dtype in (torch.float64, torch.complex128) for param in params)
    return total.to(torch.float64 if double else torch.float32)


def _local_norms(
    params: Sequence[torch.Tensor], span: Span, order: float, foreach: bool
) -> list[torch.Tensor]:
    """Returns what this rank adds: vectors of norms, or of weighted powers of norms."""
    parts: dict[float, list[torch.Tensor]] = {}
    for param, weight in zip(params, span.weights, strict=True):
        local = _local_gradient(param)
        if local is not None and local.numel() > 0:
            parts.setdefault(weight, []).append(local)
    found = []
    for weight, gradients in parts.items():
        for same in _by_device_and_dtype(gradients):
            norms = torch.stack(_norms(same, order, foreach)).to(span.device, _exact(span))
            found.append(norms if math.isinf(order) else norms.pow_(order).mul_(weight))
    return found


def _exact(span: Span) -> torch.dtype:
    """Returns the dtype of sums: MPS has no float64."""
    return torch.float32 if span.device.type == "mps" else torch.float64


def _sum(powers: list[torch.Tensor], span: Span) -> torch.Tensor:
    total = torch.zeros((), dtype=_exact(span), device=span.device)
    for each in powers:
        total += each.sum()
    if span.process_group is not None:
        all_reduce_numbers(total, span.process_group, name=_NAME)
    return total


def _largest(norms: list[torch.Tensor], span: Span) -> torch.Tensor:
    """Returns the largest of all ranks' norms.

    "Not a number" travels as a mark beside it: backends differ in what the maximum of it and 1 is.
    """
    both = torch.zeros(2, dtype=_exact(span), device=span.device)
    if norms:
        largest = torch.cat(norms).max()
        both = torch.stack([largest.nan_to_num(0.0, math.inf), largest.isnan().to(largest.dtype)])
    if span.process_group is not None:
        all_reduce_numbers(both, span.process_group, dist.ReduceOp.MAX, name=_NAME)
    return both[0].masked_fill(both[1] > 0, math.nan)


def _local_gradient(param: torch.Tensor) -> torch.Tensor | None:
    """Returns this rank's part of the gradient, cut as the parameter is."""
    gradient = param.grad
    if gradient is None or not isinstance(gradient, DTensor):
        return gradient
    if isinstance(param, DTensor) and spec_of(gradient) is spec_of(param):
        return local_shard(gradient)
    if isinstance(param, DTensor) and gradient.placements != param.placements:
        gradient = gradient.redistribute(param.device_mesh, param.placements)
    elif any(at.is_partial() for at in gradient.placements):
        gradient = gradient.redistribute(placements=[Replicate()] * gradient.device_mesh.ndim)
    return local_shard(gradient)


def _norms(gradients: list[torch.Tensor], order: float, foreach: bool) -> list[torch.Tensor]:
    """Returns the norm of each of ``gradients``, which are of one device and dtype.

    16-bit floats are added in float32, and their norm stays so.
    """
    narrow = gradients[0].dtype in (torch.float16, torch.bfloat16)
    dtype = torch.float32 if narrow else None
    if foreach:
        return foreach_norm(gradients, order, dtype)
    return [torch.linalg.vector_norm(gradient, order, dtype=dtype) for gradient in gradients]


def _by_device_and_dtype(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(found.values())

"""The norm of all gradients, and clipping by it: ``clip_grad_norm_`` and ``grad_norm``.

Owns the arithmetic over local shards. Each rank adds its own, one all-reduce adds the ranks, and
nothing waits for the device. ``norm_group`` decides which gradients count, over which ranks, and
how often.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import SupportsFloat

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from fullshard.comm.spi import (
    foreach_norm,
    foreach_scale,
    host_values,
    traits_of,
)
from fullshard.optim.norm.all_reduce import all_reduce_numbers
from fullshard.optim.norm.norm_group import NormGroup, Parameters, norm_group_of
from fullshard.optim.steps.gradient_stores import GradientStore
from fullshard.policies.spi import raise_lost_gradients
from fullshard.sharding.spi import (
    flatten,
    gradients_of,
    local_shard,
    local_shards,
    untraced,
)

__all__ = ["clip_grad_norm_", "grad_norm"]

_Stores = dict[int, GradientStore]
_NAME = "the norm of gradients"
_EPSILON = 1e-6  # torch's: a norm of 0 must not divide
_SMALL = 1024  # elements, on average; see [Note: small gradients]


@torch.no_grad()
@untraced
def clip_grad_norm_(  # torch's arguments; what is ours comes last
    parameters: Parameters,
    max_norm: float,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the norm of all gradients together, after scaling them so that it is ``max_norm``.

    Gradients with a smaller norm stay as they are. Takes what ``torch.nn.utils.clip_grad_norm_``
    takes, and a module. The function makes one all-reduce for any meshes; every rank that holds a
    part of the parameters calls it. The call does not wait for the device, unless
    ``error_if_nonfinite`` asks for the value.

    Args:
        parameters: a module, a parameter or several; each counts once. Parameters that
            ``fully_shard`` replaced, or that are unsharded now, stand for their sharded ones.
        max_norm: the largest norm that is left alone, 0 or more.
        norm_type: the p of the p-norm, more than 0; ``math.inf`` or "inf" for the largest absolute
            value.
        error_if_nonfinite: raise if the norm is infinite or not a number.
        foreach: one fused kernel per device and dtype (None, True) or one per gradient (False).
        process_group: all ranks of the model, where its parameters' meshes are only a part: the
            stages of a pipeline. None: the ranks of those meshes.

    Returns:
        The norm before clipping, equal on all ranks: a plain 0-d tensor, in float64 if a parameter
        is float64, otherwise in float32. Sums are float64 over norms taken in float32 for 16-bit
        gradients.

    Raises:
        TypeError: if ``parameters`` is or holds something that is no tensor, or another argument is
            no number.
        ValueError: if ``max_norm`` is negative, ``norm_type`` not positive, or ``process_group``
            lacks ranks.
        RuntimeError: on every rank, if the norm is not finite and ``error_if_nonfinite``, or if a
            rank cannot read a gradient in a file.
    """
    order, limit = _order(norm_type), _limit(max_norm)
    group = norm_group_of(parameters, process_group)
    gradients = gradients_of(group.params)
    fused = foreach is not False
    total = _total(group, gradients, order, fused)
    raise_lost_gradients(group.stored)
    value = host_values(total, [0.0])[0] if error_if_nonfinite else 0.0
    if not math.isfinite(value):
        raise RuntimeError(
            f"the gradients' norm of order {order} is {value}, so they cannot be clipped; skip "
            "this step on every rank, or pass error_if_nonfinite=False to scale them by it all the "
            "same"
        )
    scale = (limit / (total + _EPSILON)).clamp_(max=1.0)
    shards = zip(gradients, local_shards(gradients), strict=True)
    local = [g if shard is None else shard for g, shard in shards if g is not None]
    stores = _stores_of(group, local_shards(gradients))
    for same in _alike(local, fused):
        there = scale.to(same[0].device, same[0].dtype)  # as torch, whose products are of one dtype
        for part in _in_turn(same, stores):
            foreach_scale(part, there)
    raise_lost_gradients(group.stored)
    return total


@torch.no_grad()
@untraced
def grad_norm(
    parameters: Parameters,
    norm_type: float | str = 2.0,
    *,
    foreach: bool | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the norm of all gradients together, and changes none.

    Arguments, result and errors are those of ``clip_grad_norm_``.
    """
    order = _order(norm_type)
    group = norm_group_of(parameters, process_group)
    total = _total(group, gradients_of(group.params), order, foreach is not False)
    raise_lost_gradients(group.stored)
    return total


def _order(norm_type: object) -> float:
    order = math.inf if norm_type == "inf" else _number("norm_type", norm_type)
    if not order > 0:
        raise ValueError(f"norm_type is {norm_type}; pass a number above 0, or math.inf")
    return order


def _limit(max_norm: object) -> float:
    limit = _number("max_norm", max_norm)
    if not limit >= 0:
        raise ValueError(
            f"max_norm is {max_norm}, which would reverse gradients or make them NaN; pass a "
            "number of 0 or more, or math.inf to leave gradients unchanged"
        )
    return limit


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; pass a number")
    return float(value)


def _total(
    group: NormGroup,
    gradients: Sequence[torch.Tensor | None],
    order: float,
    fused: bool,
) -> torch.Tensor:
    """Return the norm of ``gradients``; ``fused``: by as few kernels as can be."""
    if not group.params:
        return torch.tensor(0.0)
    exact = torch.float64 if traits_of(group.device).float64 else torch.float32
    parts = _cut_as_parameters(group, gradients)
    stores = _stores_of(group, parts)
    found = []
    for weight, indices in group.by_weight.items():
        counted = [part for i in indices if (part := parts[i]) is not None and part.numel() > 0]
        for same in _alike(counted, fused):
            norms = _norms(same, order, fused, stores).to(group.device, exact)
            found.append(norms if math.isinf(order) else norms.pow_(order).mul_(weight))
    if math.isinf(order):
        total = _largest(found, group, exact)
    else:
        total = torch.zeros((), dtype=exact, device=group.device)
        for each in found:
            total += each.sum()
        if group.process_group is not None:
            all_reduce_numbers(total, group.process_group, name=_NAME)
        total.pow_(1 / order)
    return total.to(torch.float64 if group.double else torch.float32)


def _cut_as_parameters(
    group: NormGroup, gradients: Sequence[torch.Tensor | None]
) -> Sequence[torch.Tensor | None]:
    """Return this rank's part of each gradient, cut as its parameter is."""
    if group.are_cut_alike(gradients):
        return local_shards(gradients)
    parts: list[torch.Tensor | None] = []
    for param, gradient in zip(group.params, gradients, strict=True):
        if isinstance(gradient, DTensor):
            if isinstance(param, DTensor) and gradient.placements != param.placements:
                gradient = gradient.redistribute(param.device_mesh, param.placements)
            elif any(at.is_partial() for at in gradient.placements):
                whole = [Replicate()] * gradient.device_mesh.ndim
                gradient = gradient.redistribute(placements=whole)
            gradient = local_shard(gradient)
        parts.append(gradient)
    return parts


def _largest(norms: list[torch.Tensor], group: NormGroup, exact: torch.dtype) -> torch.Tensor:
    """Return the largest of all ranks' norms.

    A flag for "not a number" travels with the norm: backends differ in what the maximum of NaN
    and 1 is.
    """
    both = torch.zeros(2, dtype=exact, device=group.device)
    if norms:
        largest = torch.cat(norms).max()
        both = torch.stack([largest.nan_to_num(0.0, math.inf), largest.isnan().to(largest.dtype)])
    if group.process_group is not None:
        all_reduce_numbers(both, group.process_group, dist.ReduceOp.MAX, name=_NAME)
    return both[0].masked_fill(both[1] > 0, math.nan)


def _stores_of(group: NormGroup, parts: Sequence[torch.Tensor | None]) -> _Stores:
    """Return the policy that stores a part, by the id of the part."""
    return {id(parts[at]): store for at, store in group.stores.items()}


def _in_turn(tensors: list[torch.Tensor], stores: _Stores) -> Iterator[list[torch.Tensor]]:
    """Yield ``tensors``; one after another, each in memory, if any of them may be stored.

    A tensor that cannot be read is left out: see ``raise_lost_gradients``.
    """
    if not stores:
        yield tensors
        return
    for each in tensors:
        store = stores.get(id(each))
        if store is None or store.read_in(each):
            yield [each]


def _norms(
    gradients: list[torch.Tensor], order: float, fused: bool, stores: _Stores
) -> torch.Tensor:
    """Return norms of ``gradients``, which are of one device and dtype, as a vector.

    16-bit floats are added in float32, and their norm stays so. [Note: small gradients] On a CPU
    there is no kernel for many tensors: torch starts one for each. Copying small gradients into one
    tensor costs less. The norm of that tensor is added up in float64.
    """
    first = gradients[0]
    plain = fused and not traits_of(first.device).list_kernels and first.dtype.is_floating_point
    parts = _in_turn(gradients, stores)
    if plain and sum(map(torch.numel, gradients)) <= _SMALL * len(gradients):
        small = [each for part in parts for each in part]
        flat = flatten(small) if small else torch.zeros(1)  # if none can be read
        norm: torch.Tensor = torch.linalg.vector_norm(flat, order, dtype=torch.float64)
        return norm.view(1)
    dtype = torch.float32 if first.dtype in (torch.float16, torch.bfloat16) else None
    found = [norm for part in parts for norm in foreach_norm(part, order, dtype)]
    return torch.stack(found) if found else torch.zeros(1, device=first.device)


def _alike(tensors: list[torch.Tensor], fused: bool) -> list[list[torch.Tensor]]:
    """Return lists of tensors of one device and dtype, for one kernel each."""
    if not fused:
        return [[each] for each in tensors]
    if len({each.dtype for each in tensors}) == 1 == len({each.device for each in tensors}):
        return [tensors]
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(found.values())

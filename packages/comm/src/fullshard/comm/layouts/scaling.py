"""How a sum over ranks becomes a mean without overflowing on the way.

Owns: which reduction is asked of the backend, and what gradients are multiplied by before and after
it. Refuses: scaling itself (``reduce`` does it) and scaling masks, to which neither factor applies.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
import torch.distributed as dist

from fullshard.comm.runtime import compat

__all__ = ["ReduceOp", "ReduceScaling", "backend_averages", "op_name", "reduction_scaling"]

ReduceOp: TypeAlias = dist.ReduceOp | dist.ReduceOp.RedOpType
"""A reduction: torch names the class and the enum inside it by turns."""


@functools.cache
def op_name(op: ReduceOp) -> str:
    """Its name in lower case: "sum", "avg", ..."""
    return str(getattr(op, "op", op)).rpartition(".")[2].lower()


@dataclass(frozen=True, kw_only=True)
class ReduceScaling:
    """One reduction: ``post * op over ranks of (pre * gradient)``.

    Attributes:
        op: what the backend is asked for.
        pre: gradients are multiplied by it before; 1.0 is no multiplication. A number, or a 0-d
            tensor where the tensors are.
        post: the result is multiplied by it; 1.0 is no multiplication. As ``pre``.
        used: the number that a rank writes into the mask if it has a gradient. A single writer is
            enough for a result of at least 1.
        scales_before: whether ``pre`` multiplies anything; a tensor is not looked into.
        scales_after: whether ``post`` does.
    """

    op: ReduceOp
    pre: float | torch.Tensor
    post: float | torch.Tensor
    used: float
    scales_before: bool = field(init=False, repr=False, compare=False)
    scales_after: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Inspect the factors once: each reduction asks."""
        for name, factor in (("scales_before", self.pre), ("scales_after", self.post)):
            object.__setattr__(self, name, isinstance(factor, torch.Tensor) or factor != 1.0)

    @property
    def is_identity(self) -> bool:
        """Whether nothing is multiplied: over one rank, the result is the gradient."""
        return not (self.scales_before or self.scales_after)


@compat.without_grad
def reduction_scaling(
    world_size: int,
    dtype: torch.dtype,
    *,
    averages: bool,
    divide_factor: float | torch.Tensor | None = None,
    force_sum: bool = False,
) -> ReduceScaling:
    """The scaling whose result is the sum over ranks divided by ``divide_factor``.

    The backend's own average is used where it exists and means the same. In fp16, whose largest
    number is 65504, the division is split: before the sum by a power of two near the square root of
    the factor (exact, barring subnormals), after it by the rest, so that neither the sum overflows
    nor single gradients vanish.

    Args:
        world_size: ranks that reduce together.
        dtype: in which the reduction happens: the dtype of the sum, whatever travels.
        averages: whether the backend averages correctly; see ``backend_averages``.
        divide_factor: divide the sum by this instead of ``world_size``. A 0-d tensor, equal on all
            ranks and on the device of the gradients, is read there: the host does not wait for it,
            and what it holds now is what counts. Its value is not checked.
        force_sum: never ask the backend to average.

    Raises:
        ValueError: if ``world_size`` is not positive, ``divide_factor`` not finite and positive or
            not 0-d, or ``dtype`` not floating-point.
    """
    if world_size < 1:
        raise ValueError(
            f"reduction_scaling got world_size {world_size}; it must be >= 1. Pass "
            "process_group.size()."
        )
    if not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(
            f"reduction_scaling got {dtype}; gradients are reduced in a floating-point dtype. Pass "
            "the reduce dtype, for example torch.float32."
        )
    factor = _checked(world_size if divide_factor is None else divide_factor, dtype)
    if dtype is torch.float16:
        before = _split_off(factor)
        return ReduceScaling(op=dist.ReduceOp.SUM, pre=1 / before, post=before / factor, used=1.0)
    if averages and not force_sum and isinstance(factor, float) and factor == world_size:
        # The average divides masks too: an element of the world size comes out as the number of
        # ranks that wrote it.
        return ReduceScaling(op=dist.ReduceOp.AVG, pre=1.0, post=1.0, used=factor)
    return ReduceScaling(op=dist.ReduceOp.SUM, pre=1.0, post=1 / factor, used=1.0)


def _checked(factor: float | torch.Tensor, dtype: torch.dtype) -> float | torch.Tensor:
    if isinstance(factor, torch.Tensor):
        if factor.ndim != 0:
            raise ValueError(
                f"reduction_scaling got a divide_factor of shape {tuple(factor.shape)}; pass a 0-d "
                "tensor, for example one token count summed over all ranks."
            )
        return factor.to(torch.promote_types(dtype, torch.float32))
    if not math.isfinite(factor) or factor <= 0:
        raise ValueError(
            f"reduction_scaling got divide_factor {factor}; it must be finite and > 0, or None to "
            "divide by the world size."
        )
    return float(factor)


def _split_off(factor: float | torch.Tensor) -> float | torch.Tensor:
    """Return a power of two near the square root of ``factor``, and not below 1."""
    if isinstance(factor, torch.Tensor):
        return torch.exp2(torch.log2(factor).div(2).round().clamp(min=0))
    return 2.0 ** max(0, round(math.log2(factor) / 2))


def backend_averages(
    process_group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device | None = None
) -> bool:
    """Whether ``ReduceOp.AVG`` of the group's backend can be trusted for ``dtype``.

    NCCL: yes, for floating-point dtypes. Other backends, such as gloo: no. For such backends the
    reduction is a sum, and the division is a multiplication of the result. (Gloo's own average was
    only checked in torch 2.13, where it refuses integers.)

    Args:
        process_group: the group that reduces.
        dtype: in which the reduction happens.
        device: where the tensors are; if None, every backend of the group must average.
    """
    if not dtype.is_floating_point:
        return False
    names = compat.backend_names(process_group, device)
    return bool(names) and all(name == "nccl" for name in names)

"""Parts of all ranks reduced to one, always in rank order.

Owns: the arithmetic of a reduction whose parts are all in this process's reach. The result depends
on the parts alone: not on who came first, nor on how they are cut into blocks. bf16, fp16 and fp8
are added in fp32 and rounded once, at the end; fp32, fp64, complex and integers are added as they
are. Refuses: knowing where the parts come from, and scaling (see ``scaling``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from fullshard.comm.layouts.scaling import ReduceOp, op_name
from fullshard.comm.runtime.compat import without_grad

__all__ = ["check_reduction", "is_reduction", "reduce_checked", "reduce_in_rank_order"]

_BLOCK_NBYTES = 1 << 18  # of the result: what is added to again is still in the core's own cache

_STEPS: dict[str, Callable[..., torch.Tensor]] = {  # how one more part is taken in
    "sum": torch.add,
    "avg": torch.add,  # and the end result is divided by their number
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def is_reduction(op: ReduceOp) -> bool:
    """Whether ``op`` is a known reduction."""
    return op_name(op) in _STEPS


def check_reduction(op: ReduceOp, dtype: torch.dtype) -> str:
    """The name of a reduction that ``reduce_in_rank_order`` can do in ``dtype``.

    Raises:
        ValueError: if it cannot.
    """
    name = op_name(op)
    if name not in _STEPS:
        raise ValueError(
            f"got the reduction {name}; it must be one of: {', '.join(_STEPS)}. Use ReduceOp.SUM."
        )
    divides = dtype.is_floating_point or dtype.is_complex
    if dtype is torch.bool or (name == "avg" and not divides):
        raise ValueError(
            f"got the reduction {name} of {dtype}; reduce in a floating-point dtype, or sum "
            "integers."
        )
    return name


@without_grad
def reduce_in_rank_order(
    parts: Sequence[torch.Tensor], output: torch.Tensor, op: ReduceOp = dist.ReduceOp.SUM
) -> None:
    """Fill ``output`` (``[n]``) with the reduction of ``parts``, each ``[n]`` and of its dtype.

    ``output`` may be an element of ``parts``, and must not overlap other parts.

    Raises:
        ValueError: if ``op`` is no sum, average, maximum, minimum or product, or not defined for
            the dtype.
    """
    reduce_checked(parts, output, check_reduction(op, output.dtype))


def reduce_checked(parts: Sequence[torch.Tensor], output: torch.Tensor, name: str) -> None:
    """``reduce_in_rank_order`` by a name from ``check_reduction``, where no gradient is kept."""
    if len(parts) == 1:
        if parts[0] is not output:
            output.copy_(parts[0])
        return
    wide, two = _wide(output.dtype), len(parts) == 2
    # Two numbers of 16 bits are added in fp32 and rounded once by torch itself.
    once = two and output.dtype.itemsize == 2 and name != "avg"
    size = _BLOCK_NBYTES // wide.itemsize
    # Added to before its own turn, the result would be lost as a part.
    late = not two and any(part is output for part in parts[2:])
    direct = (wide is output.dtype or once) and not late
    if direct and (two or output.numel() <= size):  # nothing is added to again, or near
        _accumulate(parts, output, name)
        return
    total = None if direct else torch.empty(min(size, output.numel()), dtype=wide)
    for start in range(0, output.numel(), size):
        length = min(size, output.numel() - start)
        block = output.narrow(0, start, length)
        pieces = [part.narrow(0, start, length) for part in parts]
        if total is None:
            _accumulate(pieces, block, name)
        else:
            _accumulate([piece.to(wide) for piece in pieces], total[:length], name)
            block.copy_(total[:length])


def _accumulate(pieces: Sequence[torch.Tensor], total: torch.Tensor, name: str) -> None:
    step = _STEPS[name]
    step(pieces[0], pieces[1], out=total)
    for piece in pieces[2:]:
        step(total, piece, out=total)
    if name == "avg":
        total.div_(len(pieces))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which ``dtype`` is added."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype

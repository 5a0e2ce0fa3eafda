"""The time of a kernel: a roofline over its FLOPs and the bytes of its operands.

Owns which operations are kernels at all, and their FLOPs (``torch.utils.flop_counter``, fused
attention included) and bytes. An operation is described once, and timed on any device; an operation
without a formula for its FLOPs is timed by its bytes, and the kernel notes this.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from fullshard.preflight.compat import flop_formula
from fullshard.preflight.costs.call import Call
from fullshard.preflight.costs.devices import Device
from fullshard.preflight.tensors import local_tensors

__all__ = ["Kernel", "kernel_of", "kernel_seconds"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """An operation's work.

    Attributes:
        name: the operator's.
        flops: floating-point operations of matrix products and attention; 0 for all other
            operations.
        nbytes: bytes read and written.
        dtype: what it computes in.
        call: how to call it again, where it is to be measured.
    """

    name: str
    flops: int
    nbytes: int
    dtype: torch.dtype
    call: Call | None = None

    @property
    def is_attention(self) -> bool:
        """Whether it is fused attention."""
        return "attention" in self.name

    @property
    def by_bytes_alone(self) -> bool:
        """Whether it may compute more than its bytes say: no formula gives its FLOPs.

        This is true for operators of other libraries than torch, and for torch's own that do more
        than pass over their operands. Other operators of torch without a formula are bound by
        memory.
        """
        own = self.name.startswith(("aten::", "fullshard::"))
        return (
            self.call is None
            and not self.flops
            and (not own or any(part in self.name for part in _COMPUTING))
        )


def kernel_of(func: Any, args: Any, kwargs: Any, result: Any) -> Kernel | None:
    """The work of an operation; None if nothing runs on the device: a view, memory alone."""
    kind = _kind_of(func)
    if kind is None:
        return None
    given, changed = _operands(func, args, kwargs)
    read = 0 if kind == "fills" else _nbytes(*given)
    if func._schema.name in _PICKING:
        read -= max(0, _nbytes(args[0]) - _nbytes(result))
    nbytes = read + _nbytes(*changed, result)
    if not nbytes:
        return None
    formula = flop_formula(func)
    flops = int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0
    if _is_causal(func, args, kwargs):
        flops //= 2  # fused kernels skip what is masked
    return Kernel(func._schema.name, flops, nbytes, _dtype_of(args, result))


def kernel_seconds(kernel: Kernel, device: Device) -> float:
    """How long a kernel takes on a device: as long as its FLOPs or its bytes, whichever is more."""
    share = device.efficiency
    reached = share.attention if kernel.is_attention else share.matmul
    computing = kernel.flops / (device.peak(kernel.dtype) * reached)
    return max(device.shortest, computing, kernel.nbytes / (device.bandwidth * share.memory))


_COMPUTING = ("attention", "cdist", "cholesky", "conv", "fft", "grouped_mm", "gru", "lstm", "rnn")
_FREE = (
    "empty", "set_", "detach", "_local_scalar_dense", "resize_", "is_same_size", "record_",
    "_unsafe_view",
)  # fmt: skip
_FILLS = ("zeros", "ones", "zero_", "fill_", "full", "new_zeros", "new_ones", "new_full", "arange")
# Operators that write their first argument without reading it. No operator reads ``out=``.
_OVERWRITING = tuple(
    f"aten::{name}"
    for name in ("copy_", "_foreach_copy_", "normal_", "uniform_", "random_", "bernoulli_")
)
# Operators that read only the returned elements of their first argument.
_PICKING = ("aten::embedding", "aten::gather", "aten::index", "aten::index_select")


@cache
def _kind_of(func: Any) -> str | None:
    """Whether an operation reads and writes, only ``fills``, or is None of the device's."""
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    if func.namespace in ("c10d", "prim") or name.startswith(_FREE) or "empty" in name:
        return None
    returned = [each.alias_info for each in schema.returns]
    if returned and not schema.is_mutable and all(each is not None for each in returned):
        return None  # views of what it is given
    return "fills" if name.startswith(_FILLS) else "computes"


def _is_causal(func: Any, args: Any, kwargs: Any) -> bool:
    names = [each.name for each in func._schema.arguments]
    if "is_causal" not in names:
        return False
    place = names.index("is_causal")
    return bool(args[place] if place < len(args) else kwargs.get("is_causal", False))


@cache
def _roles(func: Any) -> tuple[tuple[str, bool, bool], ...]:
    """Of each argument its name, whether it is read, and whether it is written."""
    schema = func._schema
    overwrites = schema.name in _OVERWRITING
    return tuple(
        (
            argument.name,
            not (argument.is_out or (overwrites and place == 0)),
            argument.alias_info is not None and argument.alias_info.is_write,
        )
        for place, argument in enumerate(schema.arguments)
    )


def _operands(func: Any, args: Any, kwargs: Any) -> tuple[list[Any], list[Any]]:
    """Return the read arguments and the written arguments."""
    read, written = [], []
    for place, (name, reads, writes) in enumerate(_roles(func)):
        value = args[place] if place < len(args) else kwargs.get(name)
        if reads:
            read.append(value)
        if writes:
            written.append(value)
    return read, written


def _nbytes(*values: Any) -> int:
    """Bytes of all tensors, each once; an expanded tensor counts with the bytes that exist."""
    sizes = {}
    for tensor in local_tensors(values):
        sizes[id(tensor)] = min(tensor.nbytes, tensor.untyped_storage().nbytes())
    return sum(sizes.values())


def _dtype_of(args: Any, result: Any) -> torch.dtype:
    for tensor in local_tensors((args, result)):
        if tensor.dtype.is_floating_point:
            return tensor.dtype
    return torch.float32

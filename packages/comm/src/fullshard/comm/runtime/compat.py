"""Differences between torch releases, and torch's private names, in one place.

Owns: every place in this package that depends on torch's version or on a name that torch does not
promise. Versions are never compared; features are tested for. Refuses: policy; it only makes the
same call work everywhere.

Private names used (on torch 2.11, 2.13 and 2.15, unless versions are given):

- ``ProcessGroup._get_backend(device)``, ``ProcessGroup._device_types``: the only way to reach the
  backend's own allocator and its name if a process group has several device types, and to know
  which device types it has a backend for.
- ``ProcessGroup.all_gather_single`` and ``reduce_scatter_single`` (2.13, 2.15), ``_allgather_base``
  and ``_reduce_scatter_base`` (2.11), with ``AllgatherOptions``: what the functions of
  ``torch.distributed`` call, after checks that cost more host time than the launch.
- ``torch.distributed.ReduceScatterOptions`` (undocumented): what these are given.
- ``torch._C._autograd._profiler_enabled``: whether a profiler records, by a call of a builtin.
- ``torch._C._AutoDispatchBelowADInplaceOrView``: views that share memory, without a relation in
  autograd.
- ``torch.split_with_sizes_copy`` (undocumented) and ``torch._chunk_cat``: one kernel that splits
  into many tensors, or joins many.
- ``torch._foreach_copy_``, ``_foreach_zero_``, ``_foreach_mul_``, ``_foreach_lerp_`` and
  ``_foreach_norm``: many small tensors, one launch. ``torch.optim`` uses these functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist

__all__ = [
    "backend_empty",
    "backend_names",
    "default_store",
    "foreach_copy",
    "foreach_lerp",
    "foreach_norm",
    "foreach_scale",
    "foreach_zero",
    "gather_into",
    "is_profiled",
    "no_relation",
    "reduce_scatter_into",
    "served_types",
    "side_by_side",
    "split_rows",
    "symmetric_empty",
    "timeout_of",
    "without_grad",
]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _method(*names: str) -> str:
    """The first of these names under which a process group of this torch launches a collective."""
    for name in names:
        if hasattr(dist.ProcessGroup, name):
            return name
    raise ImportError(f"ProcessGroup has none of {names}; this torch is not supported.")


is_profiled = torch._C._autograd._profiler_enabled
"""Tells whether a profiler of torch records now, on this thread."""

# torch renamed these two; the old names still work in new releases, but warn.
_GATHER = _method("all_gather_single", "_allgather_base")
_REDUCE_SCATTER = _method("reduce_scatter_single", "_reduce_scatter_base")


def without_grad(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """``function`` under ``torch.no_grad()``, which makes 13 calls also where gradients are off."""
    guarded = torch.no_grad()(function)

    @functools.wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return (guarded if torch.is_grad_enabled() else function)(*args, **kwargs)

    return called


no_relation = torch._C._AutoDispatchBelowADInplaceOrView
"""A context in which a view shares memory with its tensor, and autograd relates them in no way.

A step makes one view per gradient. Autograd's record of a view takes a quarter of the time to make
the view, and lives as long as the view.
"""


_KNOWN = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
"""The dtypes that all backends gather. Others travel as bytes: gloo knows no int16, no float8."""


def gather_into(
    output: torch.Tensor, input: torch.Tensor, process_group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """Every rank's ``input`` (``[n]``), concatenated in ``output`` (``[world * n]``).

    Returns:
        The handle of an asynchronous collective. Without ``async_op``, None: the collective is over
        on the current stream.
    """
    if input.dtype not in _KNOWN:
        output, input = output.view(torch.uint8), input.view(torch.uint8)
    options = dist.distributed_c10d.AllgatherOptions()
    options.asyncOp = async_op
    work: dist.Work | None = getattr(process_group, _GATHER)(output, input, options)
    if work is not None and not async_op:
        work.wait()
        return None
    return work


def reduce_scatter_into(
    output: torch.Tensor,
    input: torch.Tensor,
    process_group: dist.ProcessGroup,
    op: Any,
    async_op: bool,
) -> dist.Work | None:
    """This rank's part (``[n]``) of the reduction over ranks of ``input`` (``[world * n]``).

    Returns:
        As ``gather_into``.
    """
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    options.asyncOp = async_op
    reduce_scatter = getattr(process_group, _REDUCE_SCATTER)
    work: dist.Work | None = reduce_scatter(output, input, options)
    if work is not None and not async_op:
        work.wait()
        return None
    return work


def backend_names(
    process_group: dist.ProcessGroup, device: torch.device | None = None
) -> tuple[str, ...]:
    """The names of the backends for ``device`` in lower case; all backends of the group if None."""
    group = cast("Any", process_group)
    try:
        devices = [device] if device is not None else list(group._device_types)
        return tuple(str(group._get_backend(each).name()).lower() for each in devices)
    except (AttributeError, RuntimeError):  # groups written in Python have no backends to ask
        return ()


def served_types(process_group: dist.ProcessGroup) -> tuple[str, ...]:
    """Return the device types for which a group has a backend; none if it is written in Python."""
    return tuple([device.type for device in cast("Any", process_group)._device_types])


def backend_empty(
    process_group: dist.ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """Return a flat uninitialised tensor from the backend's own memory; None if it has none."""
    backend = cast("Any", process_group)._get_backend(device)
    if not hasattr(backend, "allocate_tensor") or not backend.supports_tensor_alloc(device):
        return None
    return cast("torch.Tensor", backend.allocate_tensor(numel, dtype=dtype, device=device))


def timeout_of(process_group: dist.ProcessGroup) -> timedelta:
    """How long collectives on CPU tensors wait for a rank.

    The options of a backend tell (``Backend.options``, ``Options._timeout``).
    """
    try:
        backend = cast("Any", process_group)._get_backend(torch.device("cpu"))
        timeout = backend.options._timeout
    except (AttributeError, RuntimeError):
        return dist.default_pg_timeout
    return cast("timedelta", timeout)


def default_store() -> dist.Store:
    """The store over which the ranks of the default process group found each other.

    A program that ``torchrun`` started need not have made it (``_get_default_store``).
    """
    return dist.distributed_c10d._get_default_store()


def foreach_copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, casting as needed, in as few launches as possible."""
    if targets:  # torch refuses empty lists
        torch._foreach_copy_(list(targets), list(sources))


foreach_lerp = torch._foreach_lerp_
"""Moves each target towards its end by a weight, as ``torch.optim.swa_utils`` averages."""

foreach_norm = torch._foreach_norm
"""Each tensor's norm of an order, added up in a dtype, by as few kernels as can be.

``torch.nn.utils.get_total_norm`` is public, but gives one norm, in the tensors' dtype.
"""


side_by_side = torch._chunk_cat
"""Fills ``out`` (``[n, sum of m]``) with tensors of ``n * m`` elements; arguments: tensors, 0, n.

Tensors must be contiguous, with a dim 0 that is a multiple of ``n``. ``cat`` would need a view of
each, which costs twice the copy.
"""

split_rows = torch.split_with_sizes_copy
"""Fills ``out`` (each ``[n, sizes[i]]``) with parts of a tensor; arguments: tensor, sizes, 1.

All must be contiguous and of one dtype, or an accelerator launches a kernel for each.
"""


def foreach_zero(targets: Sequence[torch.Tensor]) -> None:
    """Fill every tensor with zeros, in as few launches as possible."""
    if targets:
        torch._foreach_zero_(list(targets))


def foreach_scale(targets: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply every tensor by ``factor``, in as few launches as possible.

    ``torch.nn.utils.clip_grads_with_norm_`` is public, but takes parameters, and here the gradients
    are local shards (``_foreach_mul_``).
    """
    if targets:
        torch._foreach_mul_(list(targets), factor)


def symmetric_empty(
    numel: int, dtype: torch.dtype, device: torch.device, process_group: dist.ProcessGroup
) -> torch.Tensor:
    """A flat tensor in memory that all ranks of ``process_group`` map; a collective call.

    Symmetric memory has no public module yet (``torch.distributed._symmetric_memory``).
    """
    from torch.distributed import _symmetric_memory as symmetric

    tensor: torch.Tensor = symmetric.empty(numel, dtype=dtype, device=device)
    symmetric.rendezvous(tensor, group=process_group.group_name)
    return tensor

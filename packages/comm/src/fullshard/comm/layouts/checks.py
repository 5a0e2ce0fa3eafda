"""Checks of the arguments of a list collective, before it is called.

Owns: comparing tensors with a layout and a config, the error messages, and what ``CHECKS`` see of a
layout. A rank that raises here has not entered a collective. Refuses: correcting arguments, and
asking other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fullshard.comm.layouts.layout import Layout
from fullshard.comm.layouts.scaling import ReduceScaling, op_name
from fullshard.comm.runtime.observer import EventKind, check_collective

__all__ = [
    "check_gradients",
    "check_launch",
    "check_outputs",
    "check_reducible",
    "check_shards",
    "check_world",
]


def check_launch(
    kind: EventKind,
    name: str,
    layout: Layout,
    process_group: dist.ProcessGroup,
    scaling: ReduceScaling | None = None,
    gradients: Sequence[torch.Tensor | None] = (),
) -> None:
    """Check the collective that moves the buffer of ``layout``; see ``check_collective``.

    Before anything is packed, so that an error leaves nothing behind. An all-reduce moves a slice.
    """
    detail = str(layout.buffer.dtype).removeprefix("torch.")
    if scaling is not None:
        before, after = (
            "a tensor" if isinstance(factor, torch.Tensor) else f"{factor:g}"
            for factor in (scaling.pre, scaling.post)
        )
        detail += f", {op_name(scaling.op)} scaled by {before} before and {after} after"
    slices = 1 if kind is EventKind.ALL_REDUCE else layout.world_size
    nbytes = slices * layout.buffer.slice_nbytes
    check_collective(kind, name, process_group, nbytes=nbytes, detail=detail, gradients=gradients)


def check_world(layout: Layout, process_group: dist.ProcessGroup, name: str) -> int:
    """This process's rank in ``process_group``.

    Raises:
        ValueError: if the layout was made for another world size, or this process is not in the
            group.
    """
    world_size, rank = process_group.size(), process_group.rank()
    if layout.world_size != world_size:
        raise ValueError(
            f"{_for(name)}the layout is for {layout.world_size} ranks, the process group has "
            f"{world_size}. Build the layout with process_group.size()."
        )
    if not 0 <= rank < world_size:
        raise ValueError(
            f"{_for(name)}this process is not in the process group. Call collectives on its "
            "members only."
        )
    return rank


def check_shards(
    shards: Sequence[torch.Tensor], layout: Layout, device: torch.device, rank: int, name: str
) -> None:
    """Compare this rank's shards with the layout.

    Raises:
        ValueError: if their number, a shape or a device differs, or if the cast to the layout's
            dtype could lose more than precision: floats to integers, or integers to narrower ones.
    """
    hint = f"on rank {rank} of {layout.world_size}. Shard tensors as torch.chunk does."
    shapes = [spec.arrives_as.shard_shape(rank, layout.world_size) for spec in layout.specs]
    _compare("shard", shards, shapes, device, name, hint)
    for index, (shard, spec) in enumerate(zip(shards, layout.specs, strict=True)):
        if not _can_cast(shard.dtype, spec.arrives_as.dtype):
            raise ValueError(
                f"{_for(name)}shard {index} has dtype {shard.dtype}; a cast to the spec's "
                f"{spec.arrives_as.dtype} could change its values. Cast the shard first, or pass a "
                f"spec of {shard.dtype}."
            )


def check_outputs(
    outputs: Sequence[torch.Tensor], layout: Layout, device: torch.device, name: str
) -> None:
    """Compare the full tensors to be filled with the layout.

    Raises:
        ValueError: if their number, a shape or a device differs, one is not contiguous, or the
            cast to its dtype could lose more than precision.
    """
    hint = "or be flat. Allocate it with torch.empty(spec.shape)."
    shapes = [spec.arrives_as.shape for spec in layout.specs]
    _compare("output", outputs, shapes, device, name, hint, or_flat=True)
    for index, (output, spec) in enumerate(zip(outputs, layout.specs, strict=True)):
        if not _can_cast(spec.arrives_as.dtype, output.dtype):
            raise ValueError(
                f"{_for(name)}output {index} has dtype {output.dtype}; a cast of the spec's "
                f"{spec.arrives_as.dtype} to it could change values. Allocate it with "
                "torch.empty(spec.shape, dtype=spec.dtype)."
            )
        if not output.is_contiguous():
            raise ValueError(
                f"{_for(name)}output {index} of shape {tuple(output.shape)} has strides "
                f"{output.stride()}; it must be contiguous. Allocate it with "
                "torch.empty(spec.shape)."
            )


def check_gradients(
    gradients: Sequence[torch.Tensor | None], layout: Layout, device: torch.device, name: str
) -> None:
    """Compare full gradients with the layout of a reduction.

    Raises:
        ValueError: if their number, a shape or a device differs.
    """
    hint = "in full. Pass None if there is none on this rank."
    _compare("gradient", gradients, [spec.shape for spec in layout.specs], device, name, hint)


def check_reducible(layout: Layout, name: str) -> None:
    """Check that the tensors of a layout can be reduced.

    Raises:
        ValueError: if not, for its dtypes or its used-parameter mask.
    """
    dtype, dtypes = layout.buffer.dtype, {spec.dtype for spec in layout.specs}
    if dtypes != {dtype} or not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(
            f"{_for(name)}the layout has dtypes {sorted(map(str, dtypes))}; a "
            "reduction needs one floating-point dtype. Use one layout per reduce dtype."
        )
    if layout.mask_numel not in (0, len(layout.specs)):
        raise ValueError(
            f"{_for(name)}the layout has a mask of {layout.mask_numel} for {len(layout.specs)} "
            "gradients; it must have none or one element per gradient."
        )


def _for(name: str) -> str:
    return f"{name}: " if name else ""


def _can_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether a cast loses nothing but precision.

    ``torch.can_cast`` also allows integers that the target may be too narrow for.
    """
    if source is target or target.is_floating_point or target.is_complex:
        return torch.can_cast(source, target)
    if source.is_floating_point or source.is_complex or target is torch.bool:
        return False
    if source is torch.bool:
        return True
    given, kept = torch.iinfo(source), torch.iinfo(target)
    return kept.min <= given.min and given.max <= kept.max


def _compare(
    what: str,
    tensors: Sequence[torch.Tensor | None],
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
    name: str,
    hint: str,
    *,
    or_flat: bool = False,
) -> None:
    """Compare number, shapes and devices; ``hint`` ends the message about a wrong shape."""
    if len(tensors) != len(shapes):
        raise ValueError(
            f"{_for(name)}got {len(tensors)} {what}s; the layout has {len(shapes)} tensors. Pass "
            "one per tensor, in the order of layout.specs."
        )
    for index, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        if tensor is None:
            continue
        if tensor.shape != shape and not (or_flat and tensor.shape == (math.prod(shape),)):
            raise ValueError(
                f"{_for(name)}{what} {index} has shape {tuple(tensor.shape)}; it must have {shape} "
                f"{hint}"
            )
        if tensor.device != device:
            raise ValueError(
                f"{_for(name)}{what} {index} is on {tensor.device}; this collective runs on "
                f"{device}. Move it there first."
            )

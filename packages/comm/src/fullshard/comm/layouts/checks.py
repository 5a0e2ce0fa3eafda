"""What can be wrong with the arguments of a collective over lists, found before it is called.

Owns: comparing tensors with a layout and a config, and the words of the errors. A rank that raises
here has not entered a collective. Refuses: mending anything, and asking other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fullshard.comm.layouts import views
from fullshard.comm.layouts.layout import Layout

__all__ = [
    "check_gradients",
    "check_outputs",
    "check_reducible",
    "check_shards",
    "check_world",
]


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
        ValueError: if their number, a shape or a device differs.
    """
    shapes = views.shard_shapes(layout, rank)
    if tuple([shard.shape for shard in shards]) == shapes and all(
        shard.device == device for shard in shards
    ):
        return
    _check_count("shards", len(shards), layout, name)
    for index, (shard, shape) in enumerate(zip(shards, shapes, strict=True)):
        if shard.shape != shape:
            spec = layout.specs[index]
            raise ValueError(
                f"{_for(name)}shard {index} has shape {tuple(shard.shape)} on rank {rank}; the "
                f"shard of {spec.shape} on dim {spec.dim} for rank {rank} of {layout.world_size} "
                f"has shape {shape}. Shard tensors as torch.chunk does."
            )
        _check_device("shard", index, shard, device, name)


def check_outputs(
    outputs: Sequence[torch.Tensor], layout: Layout, device: torch.device, name: str
) -> None:
    """Compare the full tensors to be filled with the layout.

    Raises:
        ValueError: if their number, a shape or a device differs, or one is not contiguous.
    """
    _check_count("outputs", len(outputs), layout, name)
    for index, (output, spec) in enumerate(zip(outputs, layout.specs, strict=True)):
        if output.shape not in (spec.shape, spec.laid_shape, (spec.numel,)):
            raise ValueError(
                f"{_for(name)}output {index} has shape {tuple(output.shape)}; it must have the "
                f"full shape {spec.shape} or be flat with {spec.numel} elements."
            )
        if not output.is_contiguous():
            raise ValueError(
                f"{_for(name)}output {index} of shape {tuple(output.shape)} has strides "
                f"{output.stride()}; it must be contiguous. Allocate it with "
                "torch.empty(spec.shape)."
            )
        _check_device("output", index, output, device, name)


def check_gradients(
    gradients: Sequence[torch.Tensor | None], layout: Layout, device: torch.device, name: str
) -> None:
    """Compare full gradients with the layout of a reduction.

    Raises:
        ValueError: if their number, a shape or a device differs.
    """
    _check_count("gradients", len(gradients), layout, name)
    for index, (gradient, spec) in enumerate(zip(gradients, layout.specs, strict=True)):
        if gradient is None or (gradient.shape == spec.shape and gradient.device == device):
            continue
        if gradient.shape != spec.laid_shape:
            raise ValueError(
                f"{_for(name)}gradient {index} has shape {tuple(gradient.shape)}; the full shape "
                f"is {spec.shape}. Pass the full gradient, or None if there is none on this rank."
            )
        _check_device("gradient", index, gradient, device, name)


def check_reducible(layout: Layout, name: str) -> None:
    """Ask whether what lies in a layout can be reduced.

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


def _check_count(what: str, count: int, layout: Layout, name: str) -> None:
    if count != len(layout.specs):
        raise ValueError(
            f"{_for(name)}got {count} {what}; the layout has {len(layout.specs)} tensors. Pass one "
            "per tensor, in the order of layout.specs."
        )


def _check_device(
    what: str, index: int, tensor: torch.Tensor, device: torch.device, name: str
) -> None:
    if tensor.device != device:
        raise ValueError(
            f"{_for(name)}{what} {index} is on {tensor.device}; this collective runs on {device}. "
            "Move it there first."
        )

"""Reads the ``ShardedTensor``s of torch's FSDP1 and of its reader of optimizer state as shards.

Owns telling whether one is cut as a parameter is, and bringing together one that is not. Nothing
here makes one: ours are ``DTensor``s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.leaves import as_cut, sharding_axis
from fullshard.comm import EventKind, check_collective
from fullshard.sharding.base.compat import ShardedTensor, local_shard, process_group_of
from fullshard.sharding.mesh.mesh_info import device_of_mesh

__all__ = ["unwrapped"]


@torch.no_grad()
def unwrapped(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor``; of a ``ShardedTensor`` this rank's shard of ``param``, or the whole.

    The shard is a ``DTensor`` of the same memory, cut as ``param``. A ``ShardedTensor`` that is cut
    otherwise becomes a whole, plain tensor by a collective of the ranks that hold it.
    """
    if not isinstance(tensor, ShardedTensor):
        return tensor
    if isinstance(param, DTensor) and _is_cut_as(tensor, param):
        held = [shard.tensor.detach() for shard in tensor.local_shards()]
        if held:
            return as_cut(param, held[0])
        return as_cut(param, local_shard(param).to(_dtype_of(tensor)))  # it has no rows here
    return _whole(tensor, device_of_mesh(param.device_mesh) if isinstance(param, DTensor) else None)


def _dtype_of(tensor: ShardedTensor) -> torch.dtype:
    return tensor.metadata().tensor_properties.dtype  # its own attributes warn


def _is_cut_as(tensor: ShardedTensor, param: DTensor) -> bool:
    """Tells, on all ranks alike, whether ranks have of ``tensor`` what they have of ``param``."""
    found = sharding_axis(param)
    if found is None or found[1] < 0 or tensor.metadata().size != param.shape:
        return False
    mesh, axis, dim = found
    ranks = dist.get_process_group_ranks(mesh.get_group(axis))
    if dist.get_process_group_ranks(process_group_of(tensor)) != ranks:
        return False
    rows = math.ceil(param.shape[dim] / len(ranks))
    expected = []
    for start in range(0, param.shape[dim], rows):
        offsets, sizes = [0] * param.ndim, list(param.shape)
        offsets[dim], sizes[dim] = start, min(rows, param.shape[dim] - start)
        expected.append((offsets, sizes))
    shards = tensor.metadata().shards_metadata
    return expected == [
        (list(each.shard_offsets), list(each.shard_sizes))
        for each in sorted(shards, key=lambda each: each.shard_offsets)
        if math.prod(each.shard_sizes) > 0
    ]


def _whole(tensor: ShardedTensor, device: torch.device | None) -> torch.Tensor:
    """Returns the whole tensor, on every rank that holds a part of it; it travels on ``device``."""
    process_group = process_group_of(tensor)
    device = torch.device("cpu") if device is None else device
    mine = [(list(s.metadata.shard_offsets), s.tensor.detach()) for s in tensor.local_shards()]
    places: list[Any] = [None] * process_group.size()  # of each rank
    dist.all_gather_object(places, [(at, part.shape) for at, part in mine], group=process_group)
    longest = max(sum(shape.numel() for _, shape in each) for each in places)
    packed = torch.zeros(longest, dtype=_dtype_of(tensor), device=device)
    for (_, part), slot in zip(mine, _slots(packed, [part.shape for _, part in mine]), strict=True):
        slot.copy_(part)
    received = [torch.empty_like(packed) for _ in places]
    check_collective(EventKind.ALL_GATHER, "a ShardedTensor", process_group, nbytes=packed.nbytes)
    dist.all_gather(received, packed, group=process_group)
    full = torch.empty(tensor.metadata().size, dtype=packed.dtype, device=device)
    for each, flat in zip(places, received, strict=True):
        for (offsets, shape), slot in zip(each, _slots(flat, [s for _, s in each]), strict=True):
            full[tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))] = slot
    return full


def _slots(flat: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """Returns views of these shapes, one after the other in ``flat``."""
    sizes = [shape.numel() for shape in shapes]
    parts = flat[: sum(sizes)].split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

"""Reads the ``ShardedTensor``s of torch's FSDP1 and of its reader of optimizer state as shards.

Owns telling whether one is cut as a parameter is, and bringing together one that is not. Nothing
here makes one: ours are ``DTensor``s.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.boxes import cuts_of
from fullshard.checkpoint.compat import ShardedTensor, process_group_of
from fullshard.checkpoint.parts import as_cut
from fullshard.sharding.base.compat import local_shard

__all__ = ["unwrapped"]


@torch.no_grad()
def unwrapped(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor``; of a ``ShardedTensor`` this rank's shard of ``param``, or the whole.

    The shard is a ``DTensor`` of the same memory, cut as ``param``. A ``ShardedTensor`` that is cut
    otherwise becomes a whole tensor on the CPU, by a collective of the ranks that hold it.
    """
    if not isinstance(tensor, ShardedTensor):
        return tensor
    metadata = tensor.metadata()  # the tensor's own attributes warn
    dtype = metadata.tensor_properties.dtype
    held = [(each.metadata.shard_offsets, each.tensor.detach()) for each in tensor.local_shards()]
    if isinstance(param, DTensor) and _is_cut_as(tensor, param):
        # a rank without rows holds nothing
        return as_cut(param, held[0][1] if held else local_shard(param).to(dtype))
    process_group = process_group_of(tensor)
    everyone: list[Any] = [None] * process_group.size()
    mine = [(offsets, part.to("cpu", copy=True)) for offsets, part in held]
    dist.all_gather_object(everyone, mine, group=process_group)
    full = torch.empty(metadata.size, dtype=dtype)
    for offsets, part in itertools.chain(*everyone):
        full[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))] = part
    return full


def _is_cut_as(tensor: ShardedTensor, param: DTensor) -> bool:
    """Tells, on all ranks alike, whether ranks have of ``tensor`` what they have of ``param``."""
    cuts, metadata = cuts_of(param), tensor.metadata()
    if len(cuts) != 1 or metadata.size != param.shape:
        return False
    group = param.device_mesh.get_group(cuts[0].axis)
    ranks = [dist.get_process_group_ranks(each) for each in (group, process_group_of(tensor))]
    shards = sorted(metadata.shards_metadata, key=lambda each: each.shard_offsets)
    found = [tuple(each.shard_sizes) for each in shards if math.prod(each.shard_sizes) > 0]
    like = torch.empty(param.shape, device="meta")
    chunks = [cuts[0].chunk(like, index) for index in range(cuts[0].count)]
    return ranks[0] == ranks[1] and found == [tuple(e.shape) for e in chunks if e.numel() > 0]

"""The tensors inside the state of one parameter: which are parts of it, and how each is cut.

Owns telling a part of a sharded tensor from a number that every rank has, the ``DTensor`` that says
so, whole tensors made of parts, and reading the ``ShardedTensor``s of torch's FSDP1 and of its
reader of optimizer state. Nothing here makes one of those: ours are ``DTensor``s.

[Note: parts] What an optimizer of torch keeps per element of a sharded parameter is a ``DTensor``,
which says itself how it is cut. One that was written for plain tensors keeps plain ones of the
shape of the rank's shard; those are parts, too. Everything else is whole on every rank: a step
count, a row statistic, ``None``, a list.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.boxes import Box, boxes_by_rank
from fullshard.checkpoint.compat import ShardedTensor, ShardMetadata, process_group_of
from fullshard.sharding import map_tensors
from fullshard.sharding.base.compat import local_shard, make_dtensor, make_spec, spec_of, storage_of

__all__ = ["PLAIN", "as_cut", "as_parts", "copied", "cut_alike", "map_state", "unwrapped", "whole"]


PLAIN = (torch.Tensor, nn.Parameter)
"""Classes of tensors that are moved by their bytes; one of its own may hold more than those."""


def map_state(fn: Callable[[str, torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Returns a parameter's state with ``fn`` applied to each tensor and the key it is under."""
    if not isinstance(value, dict):
        return map_tensors(partial(fn, ""), value)
    return {key: map_tensors(partial(fn, str(key)), item) for key, item in value.items()}


def as_cut(param: torch.Tensor, local: torch.Tensor) -> DTensor:
    """Returns the ``DTensor`` of this rank's part ``local``, cut as ``param`` is; no copy."""
    assert isinstance(param, DTensor), "only those are cut"
    if local.dtype is param.dtype:
        return make_dtensor(local, spec_of(param))
    like = torch.empty(param.shape, dtype=local.dtype, device="meta")
    return make_dtensor(local, make_spec(param.device_mesh, tuple(param.placements), like))


def cut_alike(tensor: torch.Tensor, param: torch.Tensor) -> bool:
    """Tells whether both are cut, on the same mesh and in the same way."""
    if not isinstance(tensor, DTensor) or not isinstance(param, DTensor):
        return False
    return (tensor.device_mesh, tensor.placements) == (param.device_mesh, param.placements)


def as_parts(param: torch.Tensor, value: Any) -> Any:
    """Returns the state ``value`` of ``param``, in which every part is a ``DTensor``."""
    if not isinstance(param, DTensor):
        return value
    shape = local_shard(param).shape

    def wrapped(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor) or tensor.ndim == 0 or tensor.shape != shape:
            return tensor
        return as_cut(param, tensor)

    return map_tensors(wrapped, value)


def whole(tensor: DTensor) -> torch.Tensor:
    """Returns the full tensor, on the mesh's device: shards may live on the CPU. A copy.

    Every rank of the mesh calls it.
    """
    there = tensor.detach().to(tensor.device_mesh.device_type)
    assert isinstance(there, DTensor), "moving keeps the type"
    full = there.full_tensor()
    if storage_of(full) in (0, storage_of(local_shard(tensor))):
        return full.clone()  # this rank's part may be all of it
    return full


def copied(tensor: torch.Tensor, *, to_cpu: bool) -> torch.Tensor:
    """Returns a copy, which a step does not change; of a ``DTensor`` of its shards."""
    return tensor.detach().to("cpu" if to_cpu else tensor.device, copy=True)


# -- torch's ShardedTensor ------------------------------------------------------------------------


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
    held = {_box_of(each.metadata): each.tensor.detach() for each in tensor.local_shards()}
    if isinstance(param, DTensor) and _is_cut_as(tensor, param):
        # a rank without rows holds nothing
        return as_cut(param, next(iter(held.values()), local_shard(param).to(dtype)))
    process_group = process_group_of(tensor)
    mine = {box: part.to("cpu", copy=True) for box, part in held.items()}
    everyone = [mine] * process_group.size()
    dist.all_gather_object(everyone, mine, group=process_group)
    full = torch.empty(metadata.size, dtype=dtype)
    for box, part in itertools.chain(*(parts.items() for parts in everyone)):
        box.of(full).copy_(part)
    return full


def _is_cut_as(tensor: ShardedTensor, param: DTensor) -> bool:
    """Tells, on all ranks alike, whether ranks have of ``tensor`` what they have of ``param``."""
    metadata, boxes = tensor.metadata(), boxes_by_rank(param)
    ranks = dist.get_process_group_ranks(process_group_of(tensor))
    held = sorted(map(_box_of, metadata.shards_metadata), key=lambda box: box.start)
    wanted = [boxes[rank] for rank in ranks if rank in boxes]
    alike = [box for box in held if box.numel] == [box for box in wanted if box.numel]
    return alike and metadata.size == param.shape


def _box_of(shard: ShardMetadata) -> Box:
    return Box(tuple(shard.shard_offsets), tuple(shard.shard_sizes))

"""The tensors inside an optimizer's state: which are parts of a parameter, and how each is cut.

Walks over a state, separates the parts of sharded tensors from numbers that every rank has, builds
their ``DTensor``, joins parts to whole tensors, and cuts whole tensors into parts. A
``ShardedTensor``, as torch's FSDP1 and its reader of optimizer state make them, becomes a
``DTensor`` of the same memory.

[Note: parts] A state per element of a sharded parameter is a ``DTensor`` in torch's optimizers, and
its spec describes the cut. An optimizer for plain tensors keeps plain tensors of the shape of the
rank's shard; those are parts, too. Every other state is whole and equal on all ranks: a step count,
a row statistic, ``None``, a list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fullshard.checkpoint.boxes import box_of, boxes_by_rank
from fullshard.checkpoint.compat import ShardedTensor, process_group_of
from fullshard.checkpoint.names import StateDict
from fullshard.comm.spi import carrier_of
from fullshard.sharding import map_tensors
from fullshard.sharding.spi import (
    device_of_mesh,
    local_shard,
    make_dtensor,
    make_spec,
    spec_of,
    storage_of,
)

__all__ = [
    "STEP_NUMBERS",
    "Place",
    "as_cut",
    "as_part",
    "fitted",
    "loadable",
    "map_state",
    "unwrapped",
    "whole",
]

STEP_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})
"""State that torch's optimizers keep as one number per parameter, whatever its shape."""


class Place(NamedTuple):
    """Where in an optimizer's state a tensor is.

    Attributes:
        name: that of the parameter, or the user's own key.
        key: of the kind of state.
        param: the parameter, if it is one.
    """

    name: str
    key: str
    param: torch.Tensor | None


def map_state(
    fn: Callable[[Place, torch.Tensor], torch.Tensor],
    params: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
) -> StateDict:
    """Return ``state`` with ``fn(place, tensor)`` for each tensor in it.

    In the order of ``params``, which all ranks share; what belongs to no parameter comes last.
    """
    mapped: StateDict = {}
    for name in dict.fromkeys([*filter(state.__contains__, params), *state]):
        value = state[name] if isinstance(state[name], dict) else {"": state[name]}
        found = {
            key: map_tensors(partial(fn, Place(name, str(key), params.get(name))), item)
            for key, item in value.items()
        }
        mapped[name] = found if value is state[name] else found[""]
    return mapped


def as_cut(param: torch.Tensor, local: torch.Tensor) -> DTensor:
    """Return the ``DTensor`` of this rank's part ``local``, cut as ``param`` is; no copy."""
    assert isinstance(param, DTensor), "only those are cut"
    if local.dtype is param.dtype:
        return make_dtensor(local, spec_of(param))
    like = torch.empty(param.shape, dtype=local.dtype, device="meta")
    return make_dtensor(local, make_spec(param.device_mesh, tuple(param.placements), like))


def as_part(at: Place, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``: as a ``DTensor`` if it is a part of the parameter."""
    is_number = tensor.ndim == 0 and at.key in STEP_NUMBERS
    if not isinstance(at.param, DTensor) or isinstance(tensor, DTensor) or is_number:
        return tensor
    return as_cut(at.param, tensor) if tensor.shape == local_shard(at.param).shape else tensor


def whole(tensor: DTensor) -> torch.Tensor:
    """Return the full tensor, on the mesh's device: shards may live on the CPU. A copy.

    Every rank of the mesh calls it.
    """
    mesh = tensor.device_mesh
    device = device_of_mesh(mesh)
    there = tensor.detach().to(carrier_of(mesh.get_group(0), device))
    assert isinstance(there, DTensor), "moving keeps the type"
    full = there.full_tensor().to(device)
    if storage_of(full) in (0, storage_of(local_shard(tensor))):
        return full.clone()  # this rank's part may be all of it
    return full


def fitted(param: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``; if it is cut otherwise than ``param``, all of it, by a collective.

    A ``DTensor`` whose shape differs from a sharded ``param`` is no part of it, and is returned
    unchanged.
    """
    if param is None or not isinstance(tensor, DTensor):
        return tensor
    if isinstance(param, DTensor):
        alike = (tensor.device_mesh, tensor.placements) == (param.device_mesh, param.placements)
        if alike or tensor.shape != param.shape:
            return tensor
    return whole(tensor)


def loadable(at: Place, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of what this rank keeps of ``tensor``.

    A whole tensor of the parameter's shape is cut as the parameter; a part, as a ``DTensor`` or a
    plain tensor of the shard's shape, becomes a ``DTensor``; other tensors stay unchanged. A tensor
    with another cut is gathered by a collective. Steps change the copy only, so that a state dict
    can be loaded again.
    """
    param, tensor = at.param, fitted(at.param, tensor).detach()
    if isinstance(param, DTensor) and tensor.ndim and tensor.shape == param.shape:
        try:
            tensor = tensor if isinstance(tensor, DTensor) else box_of(param).of(tensor)
        except Exception as error:
            error.add_note(f"while cutting {at.key} of {at.name}, a {type(tensor).__name__}")
            raise
    if param is None or as_part(at, tensor) is tensor:
        return tensor.clone()
    here = tensor.to(local_shard(param).device)
    return as_cut(param, here.clone(memory_format=torch.contiguous_format))


def unwrapped(at: Place, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``; a ``ShardedTensor`` as a ``DTensor`` of the same memory.

    The cut is that of the parameter if ranks hold as much of both, and by rows otherwise.

    Raises:
        ValueError: on all ranks, if it is not cut into rows.
    """
    if at.param is None or not isinstance(tensor, ShardedTensor):
        return tensor
    metadata, param = tensor.metadata(), at.param  # the tensor's own attributes warn
    like = torch.empty(metadata.size, dtype=metadata.tensor_properties.dtype, device="meta")
    device = param.device_mesh.device_type if isinstance(param, DTensor) else param.device.type
    mesh = DeviceMesh.from_group(process_group_of(tensor), device)
    rows = make_dtensor(like, make_spec(mesh, (Shard(0),), like))
    boxes = boxes_by_rank(rows)
    held = [tuple(shard.shard_sizes) for shard in metadata.shards_metadata]
    if held != [box.size for box in boxes.values() if box.numel]:
        raise ValueError(
            f"{at.key} of {at.name} is a ShardedTensor of shape {tuple(like.shape)}, cut into "
            f"{held}; pass one that is cut into rows, as torch's FSDP does, or a DTensor"
        )
    shards = [shard.tensor.detach() for shard in tensor.local_shards()]
    local = shards[0] if shards else like.new_empty((0, *like.shape[1:]), device=device)
    if isinstance(param, DTensor) and param.shape == like.shape:
        rows = param if boxes.items() <= boxes_by_rank(param).items() else rows
    return as_cut(rows, local)

"""The tensors inside the state of one parameter, and how each is cut.

Owns telling a part of a sharded tensor from a number that every rank has, and the ``DTensor`` that
says so. It moves nothing between ranks.

[Note: parts] What an optimizer of torch keeps per element of a sharded parameter is a ``DTensor``,
which says itself how it is cut. One that was written for plain tensors keeps plain ones of the
shape of the rank's shard; those are parts, too. Everything else is whole on every rank: a step
count, a row statistic, ``None``, a list.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fullshard.sharding.base.compat import local_shard, make_dtensor, make_spec, spec_of
from fullshard.sharding.base.tensors import map_tensors
from fullshard.sharding.optim.rules import STEP_NUMBERS
from fullshard.sharding.params.owner import owner_of

__all__ = ["as_cut", "as_parts", "leaves_of", "part_of", "sharding_axis"]


def leaves_of(value: Any) -> list[tuple[str, torch.Tensor]]:
    """Returns the tensors in ``value``, in order, each with the key it is found under."""
    found: list[tuple[str, torch.Tensor]] = []
    items = value.items() if isinstance(value, dict) else [("", value)]
    for key, item in items:

        def visit(tensor: torch.Tensor, key: str = str(key)) -> torch.Tensor:
            found.append((key, tensor))
            return tensor

        map_tensors(visit, item)
    return found


def as_cut(param: torch.Tensor, local: torch.Tensor) -> DTensor:
    """Returns the ``DTensor`` of this rank's part ``local``, cut as ``param`` is."""
    assert isinstance(param, DTensor)
    spec = spec_of(param)
    if local.dtype is not param.dtype:
        like = torch.empty(param.shape, dtype=local.dtype, device="meta")
        spec = make_spec(param.device_mesh, tuple(param.placements), like)
    return make_dtensor(local, spec)


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


def sharding_axis(tensor: DTensor) -> tuple[DeviceMesh, int, int] | None:
    """Returns the mesh, the axis of it and the dim along which ``tensor`` is cut in plain chunks.

    The axis is -1 where every rank has all of it. None if it is cut otherwise.
    """
    cuts = [at for at, placed in enumerate(tensor.placements) if not placed.is_replicate()]
    if not cuts:
        return tensor.device_mesh, -1, 0
    placed = tensor.placements[cuts[0]]
    if len(cuts) > 1 or type(placed) is not Shard:
        return None
    return tensor.device_mesh, cuts[0], placed.dim % max(tensor.ndim, 1)


def part_of(param: torch.Tensor, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of what this rank keeps of ``tensor``, under ``key`` in a state of ``param``.

    A whole tensor of the parameter's shape is cut as the parameter; a part, whether it says so or
    has the shape of the shard, becomes a ``DTensor``; anything else stays what it is. A ``DTensor``
    that is cut otherwise is brought together by a collective. Steps change the copy only, so that a
    state dict can be loaded again.
    """
    if isinstance(tensor, DTensor):
        if not isinstance(param, DTensor):
            return tensor.full_tensor()
        same = tensor.placements == param.placements and tensor.device_mesh == param.device_mesh
        if same or tensor.shape != param.shape:
            return tensor.detach().clone()
        tensor = tensor.full_tensor()
    if not isinstance(param, DTensor) or (tensor.ndim == 0 and key in STEP_NUMBERS):
        return tensor.detach().clone()
    shard = local_shard(param)
    if tensor.shape == param.shape:
        return as_cut(param, _cut(param, tensor.detach()).to(shard.device))
    if tensor.ndim > 0 and tensor.shape == shard.shape:
        return as_cut(param, tensor.detach().to(shard.device, copy=True))
    return tensor.detach().clone()


def _cut(param: DTensor, full: torch.Tensor) -> torch.Tensor:
    """Returns a copy of this rank's part of ``full``; nothing is sent."""
    owner = owner_of(param)
    if owner is not None:
        return owner.param.shard_of(full)
    mesh = param.device_mesh
    there = full.to(mesh.device_type)
    return local_shard(distribute_tensor(there, mesh, param.placements, src_data_rank=None)).clone()

"""The tensors inside the state of one parameter: which are parts of it, and how each is cut.

Owns telling a part of a sharded tensor from a number that every rank has, the ``DTensor`` that says
so, and a whole tensor made of parts by ``DTensor`` itself.

[Note: parts] What an optimizer of torch keeps per element of a sharded parameter is a ``DTensor``,
which says itself how it is cut. One that was written for plain tensors keeps plain ones of the
shape of the rank's shard; those are parts, too. Everything else is whole on every rank: a step
count, a row statistic, ``None``, a list.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.sharding import map_tensors
from fullshard.sharding.base.compat import local_shard, make_dtensor, make_spec, spec_of

__all__ = ["as_cut", "as_parts", "copied", "map_state", "whole"]


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
    if full.untyped_storage().data_ptr() == local_shard(tensor).untyped_storage().data_ptr():
        return full.clone()  # this rank's part is all of it
    return full


def copied(tensor: torch.Tensor, *, to_cpu: bool) -> torch.Tensor:
    """Returns a copy, which a step does not change; of a ``DTensor`` of its shards."""
    return tensor.detach().to("cpu" if to_cpu else tensor.device, copy=True)

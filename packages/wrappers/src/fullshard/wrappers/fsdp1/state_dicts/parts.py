"""What the state dicts of both wrappers share: whole and local tensors, clean names.

Owns no hook that says what a state dict holds: each wrapper has its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.wrappers.ignored_states import WRAPPED

__all__ = ["PART", "as_part", "attach_hooks", "snapshot", "whole"]

PART = f"{WRAPPED}."
"""What a wrapper puts into the names of what it wraps."""


def attach_hooks(
    wrapper: nn.Module, after_save: Callable[..., None], before_load: Callable[..., None]
) -> None:
    """Makes ``state_dict()`` and ``load_state_dict()`` of ``wrapper`` end and begin with these."""
    nn.Module.register_state_dict_post_hook(wrapper, after_save)
    nn.Module.register_load_state_dict_pre_hook(wrapper, before_load)
    nn.Module.register_load_state_dict_post_hook(wrapper, _clean_keys)


def _clean_keys(module: nn.Module, incompatible: Any) -> None:
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [key.replace(PART, "") for key in keys]


def whole(tensor: DTensor) -> torch.Tensor:
    """Returns the full tensor, on the mesh's device: shards may live on the CPU. A copy."""
    there = tensor.detach().to(tensor.device_mesh.device_type)
    assert isinstance(there, DTensor), "moving keeps the type"
    full = there.full_tensor()
    if full.untyped_storage().data_ptr() == tensor.to_local().untyped_storage().data_ptr():
        return full.clone()  # this rank's part is all of it
    return full


def snapshot(tensor: DTensor, *, to_cpu: bool) -> DTensor:
    """Returns a copy of the shards, which a step does not change."""
    copy = tensor.detach().to("cpu" if to_cpu else tensor.device, copy=True)
    assert isinstance(copy, DTensor), "copying keeps the type"
    return copy


def as_part(param: DTensor, shard: torch.Tensor) -> DTensor:
    """Returns ``shard``, of the shape of this rank's part of ``param``, as that part of it."""
    return DTensor.from_local(
        shard,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )

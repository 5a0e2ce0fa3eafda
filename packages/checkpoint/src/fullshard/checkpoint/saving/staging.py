"""Copies what a checkpoint holds to the CPU, so that training may change it at once.

Owns the copy: of a ``DTensor`` this rank's shard and nothing more, of a plain tensor its elements,
however large the storage below is. torch's stager copies whole storages, and keeps the copies
between saves.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from fullshard.sharding.base.compat import local_shard, make_dtensor, spec_of

__all__ = ["staged"]


@torch.no_grad()
def staged(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of ``state_dict`` on the CPU; waits until it is made."""
    plain = {
        key: value.state_dict() if isinstance(value, Stateful) else value
        for key, value in state_dict.items()
    }
    copied: dict[str, Any] = _copied(plain)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()  # copies into pinned memory may be on their way
    return copied


def _copied(value: Any) -> Any:
    if isinstance(value, DTensor):
        return make_dtensor(_on_cpu(local_shard(value)), spec_of(value))
    if isinstance(value, torch.Tensor):
        return _on_cpu(value)
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return copy.deepcopy(value)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cuda":
        return tensor.detach().to("cpu", copy=True)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)  # torch keeps these
    return pinned.copy_(tensor.detach(), non_blocking=True)

"""Copy a state dict to the CPU, so that training may go on at once.

``snapshot`` copies this rank's shard of a ``DTensor``, and the elements of a plain tensor, however
large the storage below is. torch's stager copies whole storages, and keeps the copies between
saves.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from fullshard.sharding.spi import local_shard, make_dtensor, spec_of

__all__ = ["snapshot"]


@torch.no_grad()
def snapshot(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``state_dict`` on the CPU, which training does not change.

    ``state_dict()`` returns the shards themselves, and the next optimizer step changes them. The
    same is true for ``get_state_dict`` of ``torch.distributed.checkpoint.state_dict``, also with
    ``cpu_offload=True``: a shard that is on the CPU already is not copied. Nothing is sent. The
    copy waits until the device has made it. Each rank may call this alone.

    Args:
        state_dict: what ``torch.distributed.checkpoint.save`` takes: nested dicts, lists and tuples
            of tensors, ``DTensor`` and other values. Of a ``Stateful`` its state dict is copied.

    Returns:
        The copy. A ``DTensor`` stays one, of the same mesh and placements.
    """
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

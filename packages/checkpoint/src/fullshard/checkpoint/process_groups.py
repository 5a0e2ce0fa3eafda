"""The ranks of a model, and process groups for threads that communicate during training.

Owns one gloo group of all ranks per purpose: its collectives and those of training never mix, so
the order in which a rank comes to them does not matter. This module never waits for an accelerator.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fullshard.comm.spi import finish_threads_at_exit

__all__ = ["own_group", "ranks_of"]

_PATIENCE = timedelta(days=1)  # a consumer, or a disk, may be slow; a lost rank is noticed at once

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


def own_group(purpose: str) -> dist.ProcessGroup:
    """Return the process group of all ranks for ``purpose``; made once, by all ranks alike.

    The group ends with the default process group.
    """
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialised"
    finish_threads_at_exit()
    groups = _made.setdefault(world, {})
    if purpose not in groups:
        groups[purpose] = dist.new_group(backend="gloo", timeout=_PATIENCE)
    return groups[purpose]


def ranks_of(params: Mapping[str, torch.Tensor]) -> set[int]:
    """Return the global numbers of all ranks on the meshes of ``params``."""
    meshes = {each.device_mesh for each in params.values() if isinstance(each, DTensor)}
    return {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}

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

from fullshard.checkpoint.compat import set_timeout
from fullshard.comm.spi import (
    finish_threads_at_exit,
    host_carrier_of,
    raise_located,
    record_process,
    timeout_of,
)

__all__ = ["own_group", "ranks_of"]

_PATIENCE = timedelta(days=1)  # a consumer, or a disk, may be slow; a lost rank is noticed at once

_CPU = torch.device("cpu")

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


def own_group(purpose: str) -> dist.ProcessGroup:
    """Return the process group of all ranks for ``purpose``; made once, by all ranks alike.

    The group ends with the default process group.

    Raises:
        PeerLostError: if a rank of this host has ended.
        RuntimeError: if another rank cannot be reached.
    """
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialised"
    finish_threads_at_exit()
    record_process()
    groups = _made.setdefault(world, {})
    if purpose not in groups:
        try:
            _meet(world)
            # a rank that cannot connect is waited for as long as in a collective of the world
            made = dist.new_group(backend="gloo", timeout=timeout_of(world))
        except RuntimeError as error:
            raise_located(error, "connection of a new process group", purpose, world)
        set_timeout(made, _PATIENCE)
        groups[purpose] = made
    return groups[purpose]


def _meet(world: dist.ProcessGroup) -> None:
    """Raise if a rank has ended: ``new_group`` would wait for it until the group's time-out."""
    if host_carrier_of(world, _CPU) is not None:  # NCCL notices no lost rank either
        dist.all_reduce(torch.zeros(1), group=world)


def ranks_of(params: Mapping[str, torch.Tensor]) -> set[int]:
    """Return the global numbers of all ranks on the meshes of ``params``."""
    meshes = {each.device_mesh for each in params.values() if isinstance(each, DTensor)}
    return {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}

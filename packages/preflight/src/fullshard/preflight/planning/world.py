"""One rank of a world of any size: a process group that moves nothing, and tensors without data."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard.comm.spi import host_reads_by
from fullshard.preflight.compat import FakeTensor, FakeTensors, lonely_group
from fullshard.sharding.spi import PLAIN

__all__ = ["MeshLike", "axes_of", "lonely_world"]

MeshLike = int | tuple[int, int] | Mapping[str, int]
"""How many ranks shard; (replicas, shards); or the size of each axis by its name."""

_NAMES = {1: ("shard",), 2: ("replicate", "shard")}


def _checked(mesh: object) -> tuple[int, ...]:
    """Return the sizes of a mesh that is a number of ranks or a pair of numbers."""
    sizes = (mesh,) if isinstance(mesh, int) else mesh
    whole = isinstance(sizes, tuple) and all(
        isinstance(each, int) and not isinstance(each, bool) for each in sizes
    )
    if not whole or not isinstance(sizes, tuple) or len(sizes) not in _NAMES:
        raise TypeError(
            f"mesh is {mesh!r}; pass a number of ranks, such as 64, or (replicas, shards), such as "
            "(8, 64)"
        )
    if min(sizes) < 1:
        raise ValueError(f"mesh is {mesh!r}; each size must be at least 1")
    return sizes


def axes_of(mesh: object) -> dict[str, int]:
    """Return the sizes of a mesh's axes by their names, after checking them.

    Raises:
        TypeError: if it is neither a number of ranks, nor a pair of numbers, nor a mapping from
            names.
        ValueError: if a size is below 1, or there is no axis.
    """
    if not isinstance(mesh, Mapping):
        sizes = _checked(mesh)
        return dict(zip(_NAMES[len(sizes)], sizes, strict=True))
    for name, size in mesh.items():
        if not isinstance(name, str) or not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(
                f"mesh has {name!r}: {size!r}; pass a number of ranks for each name of an axis, "
                'such as {"shard": 64, "tp": 8}'
            )
    if not mesh or min(mesh.values()) < 1:
        raise ValueError(
            f"mesh is {dict(mesh)!r}; give at least one axis, and each a size of 1 or more"
        )
    return dict(mesh)


def _all_alike(tensor: torch.Tensor, alike: Sequence[Any]) -> Sequence[Any]:
    """Return what the host would read if all ranks did as this rank: tensors have no values."""
    return alike


def _formatted(tensor: torch.Tensor, form: str) -> str:
    """Format a number for a log: torch does this only for tensors of its own class."""
    return format(tensor.item(), form) if tensor.dim() == 0 else object.__format__(tensor, form)


@contextmanager
def _plain() -> Iterator[None]:
    """Inside the ``with`` block a tensor without data counts as memory only."""
    PLAIN.add(FakeTensor)
    try:
        with patch.object(FakeTensor, "__format__", _formatted):
            yield
    finally:
        PLAIN.discard(FakeTensor)


@contextmanager
def lonely_world(axes: Mapping[str, int]) -> Iterator[DeviceMesh]:
    """Make this process rank 0 of a world whose other ranks are not there; give its mesh.

    Inside the ``with`` block tensors have no data, and collectives move nothing.

    Args:
        axes: the sizes of the mesh's axes by their names.

    Raises:
        RuntimeError: if this process is already in a world.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is initialised, and a plan makes a world of its own; plan before "
            "init_process_group(), or in a process of its own"
        )
    sizes = tuple(axes.values())
    with lonely_group(math.prod(sizes)):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(axes))
        with host_reads_by(_all_alike), FakeTensors(), _plain(), warnings.catch_warnings():
            # The engine asks whether memory moved by its address, which is 0 for all here.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield mesh

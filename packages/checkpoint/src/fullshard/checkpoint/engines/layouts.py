"""The parts of each parameter on all trainer ranks, computed on every rank without communication.

Owns the extension of a rank's own mesh to all ranks of the model. [Note: layouts of all ranks] A
parameter may be on a slice of the model's mesh. For example, with tensor parallelism a norm is
sharded over the data parallel axis only, and a rank sees its own slice of the mesh. If another
parameter has a mesh with more axes, and this slice is a part of that mesh, then the other axes are
axes of copies.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fullshard.checkpoint.boxes import Box, box_at
from fullshard.sharding.spi import spec_of

__all__ = ["Layout", "layouts_of"]


@dataclass(frozen=True)
class Layout:
    """The parts of a parameter on all ranks of a model.

    Attributes:
        owners: the global ranks in the order of their mesh; None: every rank has all of it.
        mesh_shape: of that mesh.
        dims: for each axis the dim that the axis cuts; None for an axis with copies. None in place
            of the tuple: the cuts are not chunks of chunks in the order of axes.
        boxes: the part of each rank.
    """

    owners: tuple[int, ...] | None
    mesh_shape: tuple[int, ...] | None
    dims: tuple[int | None, ...] | None
    boxes: Mapping[int, Box]


def layouts_of(params: Mapping[str, torch.Tensor], ranks: Sequence[int]) -> dict[str, Layout]:
    """Return the layout of each parameter.

    Args:
        params: by name, as an optimizer holds them.
        ranks: all global ranks of the model.

    Raises:
        ValueError: if a parameter is on some of the ranks, and other ranks cannot know on which.
    """
    everyone = {*ranks}
    meshes = [each.device_mesh for each in params.values() if isinstance(each, DTensor)]
    complete = [mesh for mesh in dict.fromkeys(meshes) if {*_ranks(mesh)} == everyone]
    known: dict[object, Layout] = {}  # layers of a model have equal ones
    found = {}
    for name, param in params.items():
        if not isinstance(param, DTensor):
            boxes = dict.fromkeys(ranks, Box.whole(param.shape))
            found[name] = Layout(None, None, None, boxes)
            continue
        key = param.device_mesh, tuple(param.placements), param.shape
        if key not in known:
            known[key] = _layout(name, param, complete, everyone)
        found[name] = known[key]
    return found


def _ranks(mesh: DeviceMesh) -> list[int]:
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def _layout(
    name: str, param: DTensor, complete: Sequence[DeviceMesh], everyone: set[int]
) -> Layout:
    mesh, spec = param.device_mesh, spec_of(param)
    if {*_ranks(mesh)} == everyone:
        mesh_of_all, axes = mesh, tuple(range(mesh.ndim))
    else:
        mesh_of_all, axes = _extended(name, mesh, complete)
    boxes = {}
    for place in itertools.product(*map(range, mesh_of_all.mesh.shape)):
        rank = int(mesh_of_all.mesh[place])
        boxes[rank] = box_at(spec, [place[axis] for axis in axes])
    dims: list[int | None] = [None] * mesh_of_all.ndim
    placements: Sequence[Any] = param.placements
    for axis, placement in zip(axes, placements, strict=True):
        dims[axis] = None if placement.is_replicate() else placement.dim
    in_order = all(type(each) is Shard or each.is_replicate() for each in placements)
    shape = tuple(mesh_of_all.mesh.shape)
    return Layout(tuple(_ranks(mesh_of_all)), shape, tuple(dims) if in_order else None, boxes)


def _extended(
    name: str, mesh: DeviceMesh, complete: Sequence[DeviceMesh]
) -> tuple[DeviceMesh, tuple[int, ...]]:
    """Return the mesh of all ranks of which ``mesh`` is a row, and the place of its axes there."""
    names = mesh.mesh_dim_names or ()
    for larger in complete:
        theirs, here = larger.mesh_dim_names or (), larger.get_coordinate()
        if not names or not {*names} <= {*theirs} or here is None:
            continue
        axes = tuple(theirs.index(each) for each in names)
        row = tuple(slice(None) if axis in axes else at for axis, at in enumerate(here))
        if axes == tuple(sorted(axes)) and torch.equal(larger.mesh[row], mesh.mesh):
            return larger, axes
    raise ValueError(
        f"{name} is on ranks {_ranks(mesh)}, which are not all ranks of the model, and no other "
        "parameter shows what the other ranks have; make both meshes by slicing one named mesh, "
        "and shard one parameter over all its axes"
    )

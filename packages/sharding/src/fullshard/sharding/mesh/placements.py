"""Where compute parameters, accumulated gradients and optimizer state are sharded.

Owns ``ShardingPlacements`` and its meaning on a mesh, and the mesh of neighbours that an int for
``reshard_after_forward`` asks for. Makes process groups of neighbours, and where several axes of a
mesh act as one; communicates nothing else.

[Note: placements] The optimizer's axes are those of the sharded parameters. *Compute* says what a
group keeps between its uses in one step: nothing if it names all these axes, the full parameters if
it names none, and compute shards if it names some, from which a gather is over these axes only.
*Gradients* says over which axes a backward reduces that is not the last before the optimizer's
step: ``set_is_last_backward(False)``. The last backward reduces over all axes, and ends what
*compute* keeps; see [Note: kept copies].
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard.sharding.base.compat import concatenated_mesh
from fullshard.sharding.mesh.mesh_axes import nested_mesh, one_axis
from fullshard.sharding.mesh.mesh_info import (
    FSDPMeshInfo,
    HSDPMeshInfo,
    TwoLevelMeshInfo,
    axis_names,
    device_of_mesh,
)
from fullshard.sharding.mesh.subgroups import made_once, new_subgroup

__all__ = ["EarlyReduction", "Placed", "ShardingPlacements", "placed_anew"]

_Axes = tuple[str, ...]


class EarlyReduction(Enum):
    """Over which axes gradients are reduced in a backward that is not the last of a step."""

    NONE = "none"
    FIRST = "the first level"
    ALL = "all"


@dataclass(frozen=True)
class Placed:
    """The meaning of placements, or of an int for ``reshard_after_forward``, on one mesh.

    Attributes:
        mesh_info: the mesh, as the engine sees it.
        keeps_full: whether full parameters outlive a reshard within a step.
        early_reduction: the axes over which a backward that is not the last of a step reduces.
        backward_ranks: the number of neighbours over which compute shards are kept from forward to
            backward: the int for ``reshard_after_forward``; None: none are kept.
    """

    mesh_info: FSDPMeshInfo
    keeps_full: bool = False
    early_reduction: EarlyReduction = EarlyReduction.ALL
    backward_ranks: int | None = None

    def require_divides(self, mesh_info: FSDPMeshInfo) -> None:
        """Return if parameters on ``mesh_info`` can have compute shards for backward, or have none.

        Raises:
            ValueError: if ``backward_ranks`` does not divide the number of ranks that shard.
        """
        ranks = self.backward_ranks
        if ranks is None or mesh_info.shard_mesh_dim is None:
            return
        if ranks < 1 or mesh_info.shard_world_size % ranks:
            raise ValueError(
                f"reshard_after_forward is {ranks}; it must divide the "
                f"{mesh_info.shard_world_size} ranks over which parameters are sharded on "
                f"{mesh_info.mesh}, or be True, False or None"
            )

    def post_forward_mesh(self, mesh_info: FSDPMeshInfo) -> FSDPMeshInfo | None:
        """Return the mesh of the neighbours of this rank that keep compute shards for backward.

        The call makes a process group, once for each size: call it on all ranks that shard
        together. Other ranks take no part, so each slice of a mesh may have a size of its own.

        Args:
            mesh_info: the mesh that parameters are on.

        Returns:
            The mesh; None if no compute shards are kept: also if nothing is sharded, or if
            ``backward_ranks`` means the same as False or True.
        """
        ranks = self.backward_ranks
        if mesh_info.shard_mesh_dim is None or ranks in (None, 1, mesh_info.shard_world_size):
            return None
        group = mesh_info.shard_process_group
        first = mesh_info.shard_rank // ranks * ranks
        neighbours = dist.get_process_group_ranks(group)[first : first + ranks]
        device = device_of_mesh(mesh_info.mesh)
        few = made_once(group, ranks, partial(new_subgroup, neighbours, group, device))
        return FSDPMeshInfo(DeviceMesh.from_group(few, mesh_info.mesh.device_type))


@dataclass(frozen=True)
class ShardingPlacements:
    """The axes of a mesh over which the three kinds of training state are sharded.

    A field names axes of the mesh: no axis, all, or some from its first or its last on; see [Note:
    placements]. A single name needs no tuple.

    ======================================  =========  =========  ==========
    Known as                                compute    gradients  optimizer
    ======================================  =========  =========  ==========
    ZeRO-1                                  ``()``     ``()``     None
    ZeRO-2                                  ``()``     None       None
    ZeRO-3, FSDP                            None       None       None
    ZeRO++ hpZ                              ``inner``  None       None
    Parameters in a host, optimizer in all  ``inner``  ``inner``  None
    HSDP, MiCS                              None       None       ``inner``
    ======================================  =========  =========  ==========

    Attributes:
        compute: axes over which parameters are sharded between their uses in one step; None: those
            of ``optimizer``.
        gradients: axes over which gradients are sharded that wait for the last backward of a step;
            None: those of ``optimizer``. The user announces other backwards by
            ``set_is_last_backward(False)``.
        optimizer: axes over which parameters, as the optimizer sees them, and its state are
            sharded; None: all axes. Over other axes they are replicated.
    """

    compute: str | _Axes | None = None
    gradients: str | _Axes | None = None
    optimizer: str | _Axes | None = None

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            TypeError: if a field is neither a name, nor a tuple of names, nor None.
        """
        for name in ("compute", "gradients", "optimizer"):
            object.__setattr__(self, name, axis_names(self, name))

    @classmethod
    def zero(cls, stage: int) -> ShardingPlacements:
        """Return the placements of ZeRO stage 1, 2 or 3.

        Raises:
            ValueError: if ``stage`` is none of these.
        """
        if stage not in (1, 2, 3):
            raise ValueError(f"stage is {stage!r}; ZeRO has the stages 1, 2 and 3")
        none: _Axes = ()
        return cls(compute=none if stage < 3 else None, gradients=none if stage == 1 else None)

    def __str__(self) -> str:
        """Return its name, or the axes that it names."""
        for stage in (1, 2, 3):
            if self == ShardingPlacements.zero(stage):
                return f"ZeRO-{stage}"
        axes = "".join(
            f", {name} over {'-'.join(value) or 'none'}"
            for name in ("compute", "gradients", "optimizer")
            if (value := getattr(self, name)) is not None
        )
        return f"placements{axes}"

    def on(self, mesh: DeviceMesh) -> Placed:
        """Return what these placements mean on ``mesh``.

        Makes process groups where several axes act as one: call it on all ranks of ``mesh`` alike.

        Raises:
            ValueError: if a field names axes that the mesh lacks, or others than the three states
                can have together; the message says which can.
        """
        names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
        if mesh.ndim > 1 and mesh.mesh_dim_names is None:
            raise ValueError(
                f"placements= names axes, and mesh {mesh} has no names; pass mesh_dim_names to "
                "init_device_mesh"
            )
        optimizer = self._axes("optimizer", names, names)
        if not optimizer:
            raise ValueError(
                "optimizer of ShardingPlacements is (); name the axes that shard, or use replicate"
            )
        compute = self._axes("compute", optimizer, optimizer)
        gradients = self._axes("gradients", optimizer, optimizer)
        some = {axes for axes in (compute, gradients) if axes and axes != optimizer}
        if len(some) > 1 or (some and compute == optimizer) or (some and optimizer != names):
            raise ValueError(
                f"{self!r} on a mesh of {names}: compute and gradients may each be () or "
                f"{optimizer}; if one of them is a part of the axes, the other is (), or the same "
                "part, or gradients is all of them, and optimizer names all axes of the mesh"
            )
        if some:
            first = some.pop()
            second = tuple(name for name in names if name not in first)
            pair = nested_mesh(one_axis(mesh, first), one_axis(mesh, second))
            mesh_info: FSDPMeshInfo = TwoLevelMeshInfo(pair, placed_on=mesh)
        elif optimizer != names:
            replicas = tuple(name for name in names if name not in optimizer)
            pair = concatenated_mesh([one_axis(mesh, replicas), one_axis(mesh, optimizer)])
            mesh_info = HSDPMeshInfo(pair, placed_on=mesh)
        else:
            flat = mesh if mesh.ndim == 1 else one_axis(mesh, names)
            mesh_info = FSDPMeshInfo(flat, placed_on=mesh)
        early_reduction = EarlyReduction.NONE if not gradients else EarlyReduction.ALL
        if gradients and gradients != optimizer:
            early_reduction = EarlyReduction.FIRST
        return Placed(mesh_info, keeps_full=not compute, early_reduction=early_reduction)

    def _axes(self, field: str, among: _Axes, default: _Axes) -> _Axes:
        """Return the axes of ``field``, a prefix or suffix of ``among``."""
        axes: _Axes | None = getattr(self, field)
        if axes is None:
            return default
        if axes not in (among[: len(axes)], among[len(among) - len(axes) :]):
            raise ValueError(
                f"{field} of ShardingPlacements is {axes}; it must name axes from the first or the "
                f"last of {among} on, in this order, or be () or None"
            )
        return axes


def placed_anew(mesh_info: FSDPMeshInfo, placements: ShardingPlacements) -> Placed:
    """Return what ``placements`` mean for parameters that are on ``mesh_info`` already.

    Raises:
        TypeError: if ``placements`` is no ``ShardingPlacements``.
        ValueError: if parameters would have to be cut otherwise.
    """
    if not isinstance(placements, ShardingPlacements):
        raise TypeError(
            f"placements is a {type(placements).__name__}; pass a ShardingPlacements of "
            "fullshard.sharding"
        )
    placed = placements.on(mesh_info.placed_on or mesh_info.mesh)
    before, after = mesh_info, placed.mesh_info
    if type(before) is not type(after) or before.process_groups != after.process_groups:
        raise ValueError(
            f"{placements!r} cut parameters over other axes than the present placements, so the "
            "optimizer would need other shards; build the model with these placements, and load a "
            "state dict of the present one"
        )
    return placed

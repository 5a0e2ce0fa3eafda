"""Over which ranks an FSDP1 instance shards and replicates: from process groups to a mesh.

Owns the reading of ``process_group``, ``device_mesh`` and ``device_id``. A pair of process groups
costs one exchange of rank numbers; a hybrid strategy without any makes process groups, once.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard.sharding.spi import device_type_of
from fullshard.wrappers.fsdp1.settings import ShardingStrategy

__all__ = ["Ranks", "ranks_of"]

HYBRID_AXES = ("replicate", "shard")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Where an instance communicates.

    Attributes:
        mesh: what ``fully_shard`` is given; None: all ranks.
        process_group: the ranks that shard or, with NO_SHARD, that all-reduce.
        replicas: ranks that hold equal shards; None without a hybrid strategy.
        device: where the module computes.
        code: how ``mesh`` is made, as Python; empty for None.
    """

    mesh: DeviceMesh | None
    process_group: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    device: torch.device
    code: str

    @property
    def process_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """All process groups; the sharding group comes first."""
        return (
            (self.process_group,)
            if self.replicas is None
            else (
                self.process_group,
                self.replicas,
            )
        )

    @property
    def is_first(self) -> bool:
        """Return whether this rank is the first one."""
        return all(group.rank() == 0 for group in self.process_groups)


def ranks_of(
    process_group: Any,
    device_mesh: DeviceMesh | None,
    strategy: ShardingStrategy,
    device_id: int | torch.device | None,
) -> Ranks:
    """Return what the three arguments of a constructor say together.

    Raises:
        RuntimeError: if ``torch.distributed`` was not initialised.
        TypeError: if an argument is of the wrong type.
        ValueError: if both a process group and a mesh are given, either does not fit the strategy,
            or ``device_id`` is not the device that this process uses.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "FullyShardedDataParallel needs a process group and found none; call "
            "torch.distributed.init_process_group() first (under torchrun)"
        )
    if process_group is not None and device_mesh is not None:
        raise ValueError("both process_group and device_mesh are given; pass one of them")
    if device_mesh is not None:
        return _from_mesh(device_mesh, strategy, device_id)
    if strategy.is_hybrid:
        kind = _device_kind(dist.group.WORLD, device_id)
        if process_group is None:
            return _by_node(strategy, kind)
        return _from_pair(process_group, kind)
    return _from_group(process_group, device_id, strategy)


def _from_mesh(
    mesh: DeviceMesh, strategy: ShardingStrategy, device_id: int | torch.device | None
) -> Ranks:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"device_mesh is a {type(mesh).__name__}; pass a "
            "torch.distributed.device_mesh.DeviceMesh"
        )
    wanted = 2 if strategy.is_hybrid else 1
    if mesh.ndim != wanted:
        raise ValueError(
            f"device_mesh has {mesh.ndim} dimensions {tuple(mesh.shape)}, but {strategy.name} "
            f"takes {wanted}"
            + (": (replicate, shard)" if wanted == 2 else "; pass a hybrid strategy, or one axis")
        )
    if device_id is not None:
        _device_of(torch.device(_sharding_of(device_id)).type, device_id)
    groups = mesh.get_all_groups()
    return Ranks(
        mesh=mesh,
        process_group=groups[-1],
        replicas=groups[0] if wanted == 2 else None,
        device=_device_of(mesh.device_type, device_id),
        code="device_mesh",
    )


def _from_group(
    process_group: object, device_id: int | torch.device | None, strategy: ShardingStrategy
) -> Ranks:
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"process_group is a {type(process_group).__name__}; with {strategy.name} pass one "
            "torch.distributed.ProcessGroup; a pair is for hybrid strategies"
        )
    world = dist.group.WORLD
    group = process_group or world
    assert group is not None, "torch.distributed is initialised"
    kind = _device_kind(group, device_id)
    default = group is world and kind == _device_kind(world, None)
    return Ranks(
        mesh=None if default else DeviceMesh.from_group(group, kind),
        process_group=group,
        replicas=None,
        device=_device_of(kind, device_id),
        code="" if default else f'DeviceMesh.from_group(process_group, "{kind}")',
    )


def _from_pair(pair: object, kind: str) -> Ranks:
    """Return the mesh of (the ranks that shard, the ranks that replicate)."""
    if not (
        isinstance(pair, (tuple, list))
        and len(pair) == 2
        and all(isinstance(each, dist.ProcessGroup) for each in pair)
    ):
        raise ValueError(
            f"process_group is {pair!r}; a hybrid strategy takes a pair of process groups: the "
            "ranks that shard, and the ranks that hold the same shards; or pass device_mesh"
        )
    inner, outer = pair
    rows: list[list[int]] = [[] for _ in range(outer.size())]
    dist.all_gather_object(rows, dist.get_process_group_ranks(inner), group=outer)
    mesh = DeviceMesh.from_group(
        [outer, inner], kind, mesh=torch.tensor(rows), mesh_dim_names=HYBRID_AXES
    )
    return Ranks(
        mesh=mesh,
        process_group=inner,
        replicas=outer,
        device=_device_of(kind, None),
        code=(
            f'DeviceMesh.from_group([process_group[1], process_group[0]], "{kind}", '
            f"mesh={rows}, mesh_dim_names={HYBRID_AXES})"
        ),
    )


_nodes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, int], DeviceMesh]] = (
    weakref.WeakKeyDictionary()
)


def _by_node(strategy: ShardingStrategy, kind: str) -> Ranks:
    """Return the mesh that shards inside each node; made once."""
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialised"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or torch.accelerator.device_count()
    local = local or world.size()
    if world.size() % local:
        raise ValueError(
            f"{strategy.name} without process_group shards inside each node, but {world.size()} "
            f"ranks are no multiple of the {local} of this node; pass a pair of process groups, or "
            "device_mesh"
        )
    made = _nodes.setdefault(world, {})
    shape = (world.size() // local, local)
    if (kind, local) not in made:
        made[kind, local] = init_device_mesh(kind, shape, mesh_dim_names=HYBRID_AXES)
    mesh = made[kind, local]
    return Ranks(
        mesh=mesh,
        process_group=mesh.get_group("shard"),
        replicas=mesh.get_group("replicate"),
        device=_device_of(kind, None),
        code=f'init_device_mesh("{kind}", {shape}, mesh_dim_names={HYBRID_AXES})',
    )


def _sharding_of(device_id: int | torch.device) -> str:
    if isinstance(device_id, bool) or not isinstance(device_id, (int, str, torch.device)):
        raise TypeError(
            f"device_id is {device_id!r}; pass the number of an accelerator, a torch.device or None"
        )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    there = "" if accelerator is None else accelerator.type
    kind = there if isinstance(device_id, int) else torch.device(device_id).type
    if kind != "cpu" and (not there or kind != there):
        raise ValueError(
            f"device_id is {device_id}, but there is no such accelerator here; pass None, or "
            'torch.device("cpu")'
        )
    return kind


def _device_kind(
    process_group: dist.ProcessGroup | None, device_id: int | torch.device | None
) -> str:
    """Return the type of device to compute on: as given, or that of the group's backend."""
    return device_type_of(process_group) if device_id is None else _sharding_of(device_id)


def _device_of(kind: str, device_id: int | torch.device | None) -> torch.device:
    """Return the device of this process of that kind."""
    if kind == "cpu":
        return torch.device("cpu")
    current = torch.get_device_module(kind).current_device()
    asked = device_id if isinstance(device_id, int) else None
    if device_id is not None and not isinstance(device_id, int):
        asked = torch.device(device_id).index
    if asked is not None and asked != current:
        raise ValueError(
            f"device_id is {device_id}, but this process uses {kind}:{current}; call "
            f"torch.{kind}.set_device({asked}) before"
        )
    return torch.device(kind, current)

"""How a parameter is sharded: how it is cut, gathered, used and reduced.

Owns the protocol that ``FSDPParam`` is written against and the two ordinary ways: tensors with rows
to cut, and tensors of one number, which every rank stores. Parameters that are ``DTensor`` before
``fully_shard`` are ``tensor_parallel``'s. None owns memory or knows a module.

[Note: what travels] Each names one plain tensor that the ranks of a parameter group share,
cut along one dim. For most it is the parameter. For a 0-d one it is a tensor of one element per
rank: each rank's shard is its own element, the unsharded parameter is the first, and the gradient
is laid into all of them, so that each rank's part of the reduction is the whole sum.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.distributed.tensor import Replicate

from fullshard.sharding.base.compat import ShardingSpec, make_spec
from fullshard.sharding.mesh.mesh_info import FSDPMeshInfo

__all__ = ["ParamSharding", "RowSharding", "ScalarSharding", "plain_sharding"]


class ParamSharding(Protocol):
    """How is this parameter cut, gathered, used and reduced?"""

    @property
    def spec(self) -> ShardingSpec:
        """Mesh, placements, shape and dtype of the sharded parameter and of its gradient."""
        ...

    @property
    def shape(self) -> torch.Size:
        """The shape of what travels; see [Note: what travels]."""
        ...

    @property
    def dim(self) -> int:
        """The dim along which it is cut."""
        ...

    @property
    def travels_whole(self) -> bool:
        """Whether what travels is the parameter itself: a dense gradient is reduced as it is."""
        ...

    def shard_of(self, full: torch.Tensor) -> torch.Tensor:
        """Returns what this rank stores of a full tensor: a contiguous copy."""
        ...

    def to_travel(self, stored: torch.Tensor) -> torch.Tensor:
        """Returns what this rank stores as its shard of what travels."""
        ...

    def to_store(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns a shard of what travels as this rank stores it."""
        ...

    def to_use(self, gathered: torch.Tensor) -> torch.Tensor:
        """Returns what modules see of what was gathered: it shares its memory."""
        ...

    def to_reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of what modules see, as a plain tensor of the shape that travels."""
        ...


def plain_sharding(like: torch.Tensor, mesh_info: FSDPMeshInfo, dim: int) -> ParamSharding:
    """Returns how a plain tensor is sharded, of the shape and dtype of ``like``."""
    if like.ndim == 0:
        return ScalarSharding(like, mesh_info)
    return RowSharding(like, mesh_info, dim)


class RowSharding:
    """A tensor that is cut along one of its dims: each rank stores ``1 / world_size`` of it."""

    travels_whole = True

    def __init__(self, like: torch.Tensor, mesh_info: FSDPMeshInfo, dim: int) -> None:
        """Takes shape and dtype from ``like``."""
        self.shape = torch.Size(like.shape)
        self.dim = dim
        self.spec = make_spec(mesh_info.mesh, mesh_info.placements(dim), like)
        self._mesh_info = mesh_info

    def shard_of(self, full: torch.Tensor) -> torch.Tensor:
        """Returns this rank's rows of ``full``."""
        return self._mesh_info.shard_of(full, self.dim)

    def to_travel(self, stored: torch.Tensor) -> torch.Tensor:
        """Returns ``stored``."""
        return stored

    def to_store(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns ``shard``."""
        return shard

    def to_use(self, gathered: torch.Tensor) -> torch.Tensor:
        """Returns ``gathered``."""
        return gathered

    def to_reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns ``gradient``, dense: ``nn.Embedding(sparse=True)`` has a sparse one."""
        return gradient if gradient.layout == torch.strided else gradient.to_dense()


class ScalarSharding:
    """A tensor of one number and no dim: every rank stores it; see [Note: what travels]."""

    dim = 0
    travels_whole = False

    def __init__(self, like: torch.Tensor, mesh_info: FSDPMeshInfo) -> None:
        """Takes the dtype from ``like``."""
        mesh = mesh_info.mesh
        self.shape = torch.Size((mesh_info.shard_world_size,))
        self.spec = make_spec(mesh, (Replicate(),) * mesh.ndim, like)

    def shard_of(self, full: torch.Tensor) -> torch.Tensor:
        """Returns a copy of ``full``."""
        return full.clone()

    def to_travel(self, stored: torch.Tensor) -> torch.Tensor:
        """Returns ``stored`` as this rank's element."""
        return stored.reshape(1)

    def to_store(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns this rank's element without its dim."""
        return shard.reshape(())

    def to_use(self, gathered: torch.Tensor) -> torch.Tensor:
        """Returns the first element: a view."""
        return gathered[0]

    def to_reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns ``gradient`` as every rank's element."""
        return gradient.reshape(1).repeat(self.shape[0])

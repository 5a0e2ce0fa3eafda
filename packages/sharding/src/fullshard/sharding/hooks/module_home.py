"""What a sharded module is given at construction: the policies it asks and where it lives.

Owns two records. It refuses to do anything with them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fullshard.sharding.hooks.context import RootContext
from fullshard.sharding.mesh.mesh_info import FSDPMeshInfo
from fullshard.sharding.protocols import ModuleCasts, PrefetchPolicy, ReshardPolicy

__all__ = ["ModuleHome", "ModulePolicies"]


@dataclass(frozen=True, kw_only=True)
class ModulePolicies:
    """The policies that a sharded module asks.

    Attributes:
        casts: how inputs and outputs are cast.
        reshard: what stays unsharded.
        prefetch: what is gathered ahead.
    """

    casts: ModuleCasts
    reshard: ReshardPolicy
    prefetch: PrefetchPolicy


@dataclass(frozen=True, kw_only=True)
class ModuleHome:
    """Where a sharded module lives.

    Attributes:
        mesh_info: the mesh over which it is sharded.
        device: where it computes.
        context: what it shares with its groups until a root is found.
    """

    mesh_info: FSDPMeshInfo
    device: torch.device
    context: RootContext

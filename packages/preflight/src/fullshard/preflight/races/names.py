"""Finds out which parameter or gradient memory is, from the engine's own objects.

They are looked for only when there is something to report.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor

from fullshard.preflight.compat import storage_address
from fullshard.preflight.races.regions import Region, region_of
from fullshard.sharding.params.param import FSDPParam
from fullshard.sharding.reduce.accumulation import Accumulation

__all__ = ["Names"]


class Names:
    """What the memory of sharded modules is called."""

    def of(self, storage: torch.UntypedStorage, region: Region) -> str:
        """The name of what lies in these bytes; empty if no sharded module has it."""
        address = storage_address(storage)
        found = []
        for name, tensor in _tensors():
            if (
                storage_address(tensor.untyped_storage()) == address
                and tensor.numel()
                and region_of(tensor).overlaps(region)
            ):
                found.append(name)
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        return ", ".join(sorted(set(found))[:3]) + more


def _tensors() -> Iterator[tuple[str, torch.Tensor]]:
    for param in gc.get_objects():
        if type(param) is Accumulation:
            for each, total in param.kept.items():
                yield f"{each.name} (gradient kept for a later reduction)", total
        if type(param) is not FSDPParam:
            continue
        roles = {
            "shard": param.sharded,
            "sharded gradient": param.sharded.grad,
        }
        if param.unsharded is not param.sharded:
            roles["unsharded"] = param.unsharded
            roles["unsharded gradient"] = param.unsharded.grad
        for role, tensor in roles.items():
            if tensor is not None:
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                yield f"{param.name} ({role})", local

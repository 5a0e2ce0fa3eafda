"""Finds out which parameter or gradient memory is, from the engine's own objects.

They are looked for only when there is something to report.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor

from fullshard.comm.runtime.compat import number_of
from fullshard.preflight.races.regions import Region, region_of
from fullshard.sharding.params.param import FSDPParam

__all__ = ["Names"]

_MOST_SEARCHES = 20  # of all objects of the process, for memory that may be nobody's


class Names:
    """What the memory of sharded modules is called."""

    def __init__(self) -> None:
        self._params: list[weakref.ref[FSDPParam]] = []
        self._searches = 0

    def of(self, storage: torch.UntypedStorage, region: Region) -> str:
        """The name of what lies in these bytes; empty if no sharded module has it."""
        found = self._among_known(storage, region)
        if not found and self._searches < _MOST_SEARCHES:
            self._searches += 1
            objects = gc.get_objects()
            self._params = [weakref.ref(each) for each in objects if type(each) is FSDPParam]
            found = self._among_known(storage, region)
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        return ", ".join(found[:3]) + more

    def _among_known(self, storage: torch.UntypedStorage, region: Region) -> list[str]:
        address = number_of(storage)
        params = [param for each in self._params if (param := each()) is not None]
        return sorted(
            {
                name
                for param in params
                for name, tensor in _tensors(param)
                if number_of(tensor.untyped_storage()) == address
                and tensor.numel()
                and region_of(tensor).overlaps(region)
            }
        )


def _tensors(param: FSDPParam) -> Iterator[tuple[str, torch.Tensor]]:
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

"""Finds out which parameter or gradient memory is, from the engine's own objects.

The names cover modules that were sharded during the watch; they are asked only when there is
something to report.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor

from fullshard.preflight.compat import storage_address
from fullshard.preflight.races.regions import Region, region_of
from fullshard.preflight.wording import listed
from fullshard.sharding import FSDPParam

__all__ = ["Names"]


class Names:
    """Names for the memory of modules that were sharded inside a ``following`` block."""

    def __init__(self) -> None:
        self._params: list[weakref.ref[FSDPParam]] = []

    @contextmanager
    def following(self) -> Iterator[None]:
        """Inside the ``with`` block parameters that are sharded become known."""
        made = FSDPParam.__init__

        def make(param: FSDPParam, *args: Any, **kwargs: Any) -> None:
            made(param, *args, **kwargs)
            self._params.append(weakref.ref(param))

        with patch.object(FSDPParam, "__init__", make):
            yield

    def of(self, storage: torch.UntypedStorage, region: Region) -> str:
        """Return the name of the tensor in these bytes; empty if it belongs to no such module."""
        address = storage_address(storage)
        params = [param for each in self._params if (param := each()) is not None]
        found = sorted(
            {
                name
                for param in params
                for name, tensor in _tensors(param)
                if storage_address(tensor.untyped_storage()) == address
                and tensor.numel()
                and region_of(tensor).overlaps(region)
            }
        )
        return listed(found)


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

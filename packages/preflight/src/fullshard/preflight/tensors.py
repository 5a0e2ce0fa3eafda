"""Helpers that observe tensors: those in nests of values, and storages that are resized.

Owns what no dispatch mode shows by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor

from fullshard.sharding import map_tensors

__all__ = ["each_tensor", "local_tensors", "resizes_told"]


def each_tensor(value: Any) -> list[torch.Tensor]:
    """Return every tensor in nested containers, in order; one that comes twice is there twice."""
    found: list[torch.Tensor] = []

    def visit(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(visit, value)
    return found


def local_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor with memory in nested lists and tuples; of a DTensor its local one."""
    return iter(_collected(value, []))


def _collected(value: Any, found: list[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if isinstance(value, DTensor):
            found.append(value.to_local())
        elif value.layout is torch.strided and value.device.type != "meta":  # is_meta is slow
            found.append(value)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _collected(each, found)
    return found


@contextmanager
def resizes_told(tell: Callable[[torch.UntypedStorage, int], object]) -> Iterator[None]:
    """Inside the ``with`` block ``tell`` is called with each storage that was resized.

    No dispatch mode sees that.

    Args:
        tell: gets the storage, and the bytes that it had before.
    """
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
        before = storage.nbytes()
        result = resize(storage, nbytes)
        tell(storage, before)
        return result

    with patch.object(torch.UntypedStorage, "resize_", resize_):
        yield

"""How much memory is alive at once of what operations allocate in a block of code."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from support.dispatch import Mode


class LiveMemory(Mode):
    """Counts the bytes of storages that are alive after each operation.

    Attributes:
        peak: the most that there were at once, in bytes, of storages made inside the block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Adds what the operation made, forgets what has gone."""
        given = {_storage(each) for each in pytree.tree_leaves((args, kwargs))}
        self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
        for each in pytree.tree_leaves(result):
            key = _storage(each)
            if key and key not in given and key not in self._alive:
                storage = each.untyped_storage()
                self._alive[key] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._alive.values()))


def _storage(value: Any) -> int:
    """Names the memory of a tensor; 0: there is none."""
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return 0
    return value.untyped_storage().data_ptr()

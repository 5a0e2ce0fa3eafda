"""Tensor storages as things with a number: what is alive, and who shares memory with whom.

Owns weak references to storages. A storage's address is reused after its death, so each gets a
number of its own when it is first seen. Tensors inside lists and tuples are found too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

__all__ = ["Storages", "local_tensors"]


def local_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor with memory in nested lists and tuples; of a DTensor its local one."""
    if isinstance(value, DTensor):
        yield value.to_local()
    elif isinstance(value, torch.Tensor):
        if value.layout is torch.strided and not value.is_meta:
            yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from local_tensors(each)


class Storages:
    """Numbers for storages, by first sight.

    Args:
        sharers: told a tensor, how many processes count its memory in equal parts.
    """

    def __init__(self, sharers: Callable[[torch.Tensor], int] = lambda tensor: 1) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, int]] = {}
        self._seen = 0
        self._sharers = sharers

    def number(self, tensor: torch.Tensor) -> int:
        """The number of the tensor's storage; the same as long as the storage lives."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        entry = self._known.get(address)
        if entry is not None and entry[0]() is not None:
            return entry[1]
        self._seen += 1
        self._known[address] = (weakref.ref(storage), self._seen, self._sharers(tensor))
        return self._seen

    def nbytes(self) -> int:
        """Bytes that all storages seen so far hold now: of shared ones this process's part."""
        total = 0
        dead = []
        for address, (reference, _, sharers) in self._known.items():
            storage = reference()
            if storage is None:
                dead.append(address)
            else:
                total += storage.nbytes() // sharers
        for address in dead:
            del self._known[address]
        return total

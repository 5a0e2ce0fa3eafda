"""Tensor storages as things with a number: what is alive, and who shares memory with whom.

Owns weak references to storages. A storage's address is reused after its death, so each gets a
number of its own when it is first seen. Tensors inside lists and tuples are found too. Several
storages may show the same pages of a file, which count once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

__all__ = ["Sharing", "Storages", "local_tensors"]


@dataclass(frozen=True, slots=True)
class Sharing:
    """Whose a storage's memory is.

    Attributes:
        sharers: how many processes count it in equal parts.
        file: the file whose first pages it is; empty if it is memory of its own.
    """

    sharers: int = 1
    file: str = ""


_OWN = Sharing()


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
        sharing: told a tensor, whose its memory is.
    """

    def __init__(self, sharing: Callable[[torch.Tensor], Sharing] = lambda tensor: _OWN) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, Sharing]] = {}
        self._seen = 0
        self._sharing = sharing

    def number(self, tensor: torch.Tensor) -> int:
        """The number of the tensor's storage; the same as long as the storage lives."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        entry = self._known.get(address)
        if entry is not None and entry[0]() is not None:
            return entry[1]
        self._seen += 1
        self._known[address] = (weakref.ref(storage), self._seen, self._sharing(tensor))
        return self._seen

    def nbytes(self) -> int:
        """Bytes that all storages seen so far hold now: of shared ones this process's part."""
        return sum(self.sizes().values())

    def sizes(self) -> dict[int, int]:
        """The bytes of each storage that is alive, by number; see ``nbytes``."""
        sizes: dict[int, int] = {}
        files: dict[str, int] = {}
        dead = []
        for address, (reference, number, sharing) in self._known.items():
            storage = reference()
            if storage is None:
                dead.append(address)
                continue
            part = storage.nbytes() // sharing.sharers
            if sharing.file:  # of storages that show the same pages, the largest counts
                seen = files.get(sharing.file, 0)
                files[sharing.file] = max(part, seen)
                part = files[sharing.file] - seen
            sizes[number] = part
        for address in dead:
            del self._known[address]
        return sizes

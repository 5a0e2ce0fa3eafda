"""Who holds a tensor: whether its memory may be used again, because nobody looks at it any more.

Owns the counting. Refuses: raw pointers, which nobody can count.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

import torch

from fullshard.comm.runtime import compat

__all__ = ["are_held_by", "is_memory_of"]


def are_held_by(tensors: list[torch.Tensor], holders: Sequence[int]) -> bool:
    """Whether tensor ``i`` is held by the list, ``holders[i]`` other Python objects, nothing else.

    Views of its memory are tensors of their own and not counted: see ``is_memory_of``.
    """
    expected = [_ALONE + count for count in holders]
    return _references(tensors) == expected and not any(map(compat.held_elsewhere, tensors))


def is_memory_of(tensor: torch.Tensor, count: int) -> bool:
    """Whether ``count`` tensors, ``tensor`` among them, share its memory, and nothing else does."""
    objects, users = _holders_of_memory(tensor)
    objects_alone, users_alone = _of_lone_memory()
    return objects == objects_alone and users == users_alone + count - 1


def _holders_of_memory(tensor: torch.Tensor) -> tuple[int, int]:
    """References to its storage: in Python to the one object there is, and in C++."""
    storage = tensor.untyped_storage()
    return _references([storage])[0], compat.storage_use_count(storage)


@functools.cache
def _of_lone_memory() -> tuple[int, int]:
    return _holders_of_memory(torch.empty(1))  # releases of torch count differently


def _references(objects: Sequence[object]) -> list[int]:
    return [sys.getrefcount(each) for each in objects]


_ALONE = _references([object()])[0]  # of what a list holds: versions of Python count differently

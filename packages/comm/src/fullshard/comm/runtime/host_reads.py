"""Reads values of tensors on the host, which waits for the device: the one place that does.

Owns who reads: the tensor itself, unless a simulator, whose tensors have no values, answers.
Callers therefore also pass the values that they would read if all ranks were like this rank. Meshes
are no such tensors: their values are the host's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["host_reads_by", "host_values"]

_Reader = Callable[[torch.Tensor, Sequence[Any]], Sequence[Any]]
_readers: list[_Reader] = [lambda tensor, alike: tensor.flatten().tolist()]


def host_values(tensor: torch.Tensor, alike: Sequence[Any]) -> Sequence[Any]:
    """Return the elements of ``tensor``, flat; ``alike``: those if all ranks are like this one."""
    return _readers[-1](tensor, alike)


@contextmanager
def host_reads_by(reader: _Reader) -> Iterator[None]:
    """A context in which ``reader`` answers ``host_values``, on all threads of this process."""
    _readers.append(reader)
    try:
        yield
    finally:
        _readers.pop()

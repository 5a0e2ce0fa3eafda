"""Reads values of tensors on the host, which waits for the device: the one place that does.

Owns who reads: the tensor itself, unless a simulator, whose tensors have no values, answers. So
each reader says what it would read if all ranks did as this one does. Meshes are no such tensors:
their values are the host's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

__all__ = ["HostReads", "host_reads_by", "host_values"]


class HostReads(Protocol):
    """Who reads values for the host."""

    def values(self, tensor: torch.Tensor, alike: Sequence[Any]) -> Sequence[Any]:
        """Returns the elements of ``tensor``; ``alike``: those if all ranks are like this one."""
        raise NotImplementedError


class _OfTensor:
    """Reads the tensor."""

    def values(self, tensor: torch.Tensor, alike: Sequence[Any]) -> Sequence[Any]:
        found: list[Any] = tensor.flatten().tolist()
        return found


_readers: list[HostReads] = [_OfTensor()]


def host_values(tensor: torch.Tensor, alike: Sequence[Any]) -> Sequence[Any]:
    """Returns the elements of ``tensor``, flat; see ``HostReads``."""
    return _readers[-1].values(tensor, alike)


@contextmanager
def host_reads_by(reader: HostReads) -> Iterator[None]:
    """A context in which ``reader`` answers, on all threads of this process."""
    _readers.append(reader)
    try:
        yield
    finally:
        _readers.pop()

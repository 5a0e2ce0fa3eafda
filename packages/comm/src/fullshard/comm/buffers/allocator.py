"""Where the buffers of a collective come from.

Owns: the allocator of a default collective; the transport is the second part. Refuses: keeping or
pooling buffers: a returned tensor belongs to the caller.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from fullshard.comm.runtime import compat

__all__ = [
    "Allocates",
    "Allocator",
    "BufferMemory",
    "CachingAllocator",
    "ProcessGroupAllocator",
    "SymmetricMemoryAllocator",
]


class Allocator(Protocol):
    """Gives uninitialised contiguous tensors."""

    def empty(
        self, size: Sequence[int], /, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A new uninitialised contiguous tensor, ordered on the current stream."""


class Allocates(Protocol):
    """A collective, as far as it gives the buffers that it is then called with."""

    @abstractmethod
    def allocate(
        self, size: Sequence[int], /, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A contiguous tensor of ``size``; its contents may be anything."""


class BufferMemory:
    """The source of the buffers of collectives: an adapted collective.

    Attributes:
        reusable: whether memory from ``allocate`` may be reused for later collectives.
        allocate: the method of the collective that allocates buffers.
        allocates: its name, for messages.
    """

    reusable = False
    allocate: Callable[..., torch.Tensor]
    allocates: str


@dataclass(frozen=True, slots=True)
class CachingAllocator:
    """Torch's own (caching) allocator for the device: ``torch.empty``."""

    empty = staticmethod(torch.empty)  # no frame of ours
    """Return an uninitialised tensor, as ``torch.empty`` does."""


@dataclass(frozen=True)
class ProcessGroupAllocator:
    """The process group's own memory, which some backends move faster (NCCL: registered buffers).

    Args:
        process_group: the group whose backend allocates.
    """

    process_group: dist.ProcessGroup

    def empty(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A tensor from the backend's own memory.

        Raises:
            ValueError: if the backend of this device cannot allocate (gloo and CPU cannot; NCCL can
                on recent drivers).
        """
        flat = compat.backend_empty(self.process_group, math.prod(size), dtype, device)
        if flat is None:
            names = ", ".join(compat.backend_names(self.process_group, device))
            raise ValueError(
                f"ProcessGroupAllocator got a process group whose backend for {device} is {names}, "
                "which does not allocate tensors. Use a backend with allocate_tensor (NCCL), or "
                "CachingAllocator()."
            )
        return flat.view(tuple(size))


@dataclass(frozen=True)
class SymmetricMemoryAllocator:
    """Memory that all ranks of a group map, over which NCCL can copy without a kernel.

    Not measured: it needs several GPUs on one node.

    Args:
        process_group: the ranks that map it. All ranks allocate together and in equal order.
    """

    process_group: dist.ProcessGroup

    def empty(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A tensor in symmetric memory.

        Raises:
            ValueError: if the device is no CUDA device or its backend is not NCCL.
        """
        names = compat.backend_names(self.process_group, device)
        if names != ("nccl",):
            raise ValueError(
                f"SymmetricMemoryAllocator got device {device} and backend {', '.join(names)}; it "
                "needs CUDA and NCCL. Use CachingAllocator()."
            )
        flat = compat.symmetric_empty(math.prod(size), dtype, device, self.process_group)
        return flat.view(tuple(size))

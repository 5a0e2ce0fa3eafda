"""Host memory of this rank that holds the state of parameters on a device.

``HostMemory`` is the main class: it has the methods of ``StateFile``, and page-locked memory where
the accelerator has such memory. ``device_staging`` orders the copies.
"""

from __future__ import annotations

import errno
from bisect import bisect_right
from collections.abc import Sequence

import torch

from fullshard.comm.spi import can_pin
from fullshard.optim.tiers.state_file import Extent, aligned, joined

__all__ = ["HostMemory"]

_SLAB = 64 << 20  # bytes; a power of two, to which torch rounds page-locked memory up
_HOST = torch.device("cpu")


class HostMemory:
    """Slabs of host memory. Extents are numbered as if the slabs followed one another.

    Attributes:
        device: the device whose state is held; None until a tensor of the state is there.
        direct: False; see ``StateFile``.
        bytes_read: bytes copied to the device so far.
        bytes_written: bytes copied from it.
    """

    def __init__(self, slab_bytes: int = _SLAB) -> None:
        """Start without memory."""
        self.device: torch.device | None = None
        self.direct = False
        self.bytes_read = self.bytes_written = 0
        self._slab_bytes = slab_bytes
        self._slabs: list[torch.Tensor] = []
        self._starts: list[int] = []  # the number of each slab's first byte
        self._used: list[int] = []  # bytes of each slab
        self._spare: dict[int, list[Extent]] = {}  # given back, by size

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return whether the memory is for a tensor of the state: if that is on the device."""
        if tensor.device == _HOST:
            return False
        self.device = self.device or tensor.device
        return tensor.device == self.device

    def reserve(self, nbytes: int) -> Extent:
        """Return an extent of at least ``nbytes``.

        Raises:
            OSError: if the host has no memory for it.
        """
        size = aligned(nbytes)
        if self._spare.get(size):
            return self._spare[size].pop()
        if not self._slabs or self._used[-1] + size > self._slabs[-1].numel():
            self._add_slab(max(size, self._slab_bytes))
        extent = Extent(self._starts[-1] + self._used[-1], size)
        self._used[-1] += size
        return extent

    def _add_slab(self, nbytes: int) -> None:
        try:
            with torch.inference_mode(False):
                slab = torch.empty(nbytes, dtype=torch.uint8, pin_memory=can_pin(_HOST))
        except RuntimeError as error:  # torch's error of memory, page-locked or not
            raise OSError(errno.ENOMEM, str(error).partition("\n")[0]) from None
        end = self._starts[-1] + self._slabs[-1].numel() if self._slabs else 0
        self._slabs.append(slab)
        self._starts.append(end + aligned(1))  # a gap: no run of extents crosses slabs
        self._used.append(0)

    def give_back(self, extent: Extent) -> None:
        """Let another tensor of the same size have ``extent``."""
        self._spare.setdefault(extent.nbytes, []).append(extent)

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return bytes of one slab, ``[nbytes]`` uint8 on the host."""
        slab = bisect_right(self._starts, offset) - 1
        start = offset - self._starts[slab]
        return self._slabs[slab][start : start + nbytes]

    def read(self, extents: Sequence[Extent], into: torch.Tensor) -> None:
        """Copy the extents, one after the other, to ``into`` on the current stream."""
        self.bytes_read += into.numel()
        start = 0
        for offset, nbytes in joined(extents):
            into[start : start + nbytes].copy_(self.view(offset, nbytes), non_blocking=True)
            start += nbytes

    def write(self, extents: Sequence[Extent], data: torch.Tensor) -> None:
        """Copy ``data`` to the extents, one after the other, on the current stream."""
        self.bytes_written += data.numel()
        start = 0
        for offset, nbytes in joined(extents):
            self.view(offset, nbytes).copy_(data[start : start + nbytes], non_blocking=True)
            start += nbytes

"""The flat buffer of a collective, its views, and pools that keep memory for the next one.

Owns: memory that travels. A new buffer for each collective would cost page faults and new views. A
pool reuses a few blocks instead. Refuses: knowing when a collective is over: who took a buffer
gives it back then.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from fullshard.comm.buffers.allocator import BufferMemory
from fullshard.comm.layouts import views
from fullshard.comm.layouts.layout import Layout
from fullshard.comm.runtime.streams import CommStreams, Stream, StreamEvent

__all__ = ["BlockPool", "Buffer", "BufferPool", "BufferSource", "allocate_from"]


@dataclass(eq=False)
class Buffer:
    """The buffer for one collective and one layout, and its views (each is made once).

    Attributes:
        tensor: all of it, flat, ``[world * slice_numel]``.
        layout: where things lie.
        rank: whose slice is this process's own.
        block: the memory block of the pool that contains the buffer; None if the buffer has its own
            memory.
        ranks: consecutive ones, whose slices it has; all, unless only gradients are written to it.
    """

    tensor: torch.Tensor
    layout: Layout
    rank: int
    block: torch.Tensor | None = None
    ranks: range = range(0)

    def __post_init__(self) -> None:
        """All ranks, if none were named."""
        self.ranks = self.ranks or range(self.layout.world_size)

    @cached_property
    def slice(self) -> torch.Tensor:
        """This rank's slice."""
        numel = self.layout.buffer.slice_numel
        return self.tensor.narrow(0, self.rank * numel, numel)

    @cached_property
    def all_slices(self) -> tuple[torch.Tensor, ...]:
        """The slices in the order of ranks."""
        return self.tensor.view(self.layout.world_size, -1).unbind()

    @cached_property
    def shards(self) -> list[torch.Tensor]:
        """Views of this rank's shards in its slice, one view per tensor of the layout."""
        return views.shard_views(self.slice, self.layout, self.rank)

    @cached_property
    def pieces(self) -> list[list[torch.Tensor]]:
        """Views of the pieces of each tensor of the layout; see ``views.piece_views``."""
        return views.piece_views(self.tensor, self.layout, self.ranks)

    @cached_property
    def all_pieces(self) -> list[torch.Tensor]:
        """``pieces`` of all tensors, one after the other."""
        return [view for piece in self.pieces for view in piece]

    @cached_property
    def gaps(self) -> list[torch.Tensor]:
        """Views of the padding: everything outside the shards and the mask."""
        return views.gap_views(self.tensor, self.layout, self.ranks)

    @cached_property
    def stacked(self) -> torch.Tensor | None:
        """The slices, ``[ranks, slice_numel]``, if the layout divides evenly; else None."""
        even = views.divides_evenly(self.layout)
        return self.tensor.view(len(self.ranks), -1) if even else None

    @cached_property
    def mask(self) -> torch.Tensor:
        """The used-parameter masks, ``[world, mask_numel]``."""
        return views.mask_view(self.tensor, self.layout)


class BufferSource:
    """Where buffers of collectives come from: new memory each time, of the collective's allocate.

    ``BufferPool`` gives the same again instead.
    """

    def take(self, comm: BufferMemory, layout: Layout, rank: int, device: torch.device) -> Buffer:
        """A buffer for ``layout``; its contents may be anything.

        Args:
            comm: whose ``allocate`` new memory comes from.
            layout: where things lie.
            rank: whose slice is this process's own.
            device: where the memory is.

        Raises:
            TypeError: if ``allocate`` gave no tensor.
            ValueError: if the tensor has a wrong size, dtype, device or alignment.
        """
        spec = layout.buffer
        numel = spec.slice_numel * layout.world_size
        tensor = allocate_from(comm, numel, dtype=spec.dtype, device=device)
        return Buffer(tensor, layout, rank)

    def release(
        self,
        buffer: Buffer,
        streams: CommStreams,
        owner: Stream,
        after: StreamEvent | None = None,
        *,
        keep: int = 0,
    ) -> None:
        """End the use of a buffer: its memory goes back to the stream that allocated it.

        Args:
            buffer: the buffer of a finished collective.
            streams: the streams of the collective.
            owner: the stream that allocated it.
            after: the last use; None: the present end of the current stream.
            keep: see ``CommStreams.retire``.
        """
        streams.retire(buffer.tensor, owner, after or streams.record(), keep=keep)


class BlockPool:
    """Blocks of memory, ``[n]`` uint8, for use one after the other on devices without streams.

    There are as many as were ever in use at once, each as large as it had to be.

    Attributes:
        free: the blocks that no collective uses, ordered by size.
    """

    def __init__(self) -> None:
        """Start without memory."""
        self.free: list[torch.Tensor] = []  # by size

    def take_block(self, nbytes: int, new: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """The smallest free block of ``nbytes`` at least, to be put back after use.

        If there is none, a new one, for which one that is too small makes room.
        """
        place = bisect.bisect_left(self.free, nbytes, key=torch.Tensor.numel)
        if place < len(self.free):
            return self.free.pop(place)
        if self.free:
            self.dropped(self.free.pop())
        with torch.inference_mode(False):  # an inference tensor could not be written in training
            return new(nbytes)

    def put_back(self, block: torch.Tensor) -> None:
        """Take back a block that is no longer used."""
        bisect.insort(self.free, block, key=torch.Tensor.numel)

    def dropped(self, block: torch.Tensor) -> None:
        """Handle the removal of a block from the pool."""

    @property
    def nbytes(self) -> int:
        """The size of all free blocks in bytes."""
        return sum(block.numel() for block in self.free)


class BufferPool(BlockPool, BufferSource):
    """A few blocks of memory that collectives use one after the other, with their views.

    An ``allocate`` of a user may have to return a new buffer each time, so only collectives that
    declare ``reusable`` get memory from the pool; the default collectives declare it. For devices
    without streams: blocks carry no events.
    """

    def __init__(self) -> None:
        """Start without memory."""
        super().__init__()
        # By block, then by layout and rank. Both by identity: a step hashes no layout.
        self._made: dict[int, dict[tuple[int, int], Buffer]] = {}

    def take(self, comm: BufferMemory, layout: Layout, rank: int, device: torch.device) -> Buffer:
        """A buffer in the smallest free block that holds it, or in a new one."""
        if not comm.reusable:
            return super().take(comm, layout, rank, device)
        spec = layout.buffer
        nbytes = layout.world_size * spec.slice_numel * spec.dtype.itemsize
        new = functools.partial(allocate_from, comm, dtype=torch.uint8, device=device)
        block = self.take_block(nbytes, new)
        made = self._made.setdefault(id(block), {})
        if (id(layout), rank) not in made:
            with torch.inference_mode(False):  # views, too, are used in training
                tensor = block.narrow(0, 0, nbytes).view(spec.dtype)
            made[id(layout), rank] = Buffer(tensor, layout, rank, block)
        return made[id(layout), rank]

    def dropped(self, block: torch.Tensor) -> None:
        """Drop the views of a removed block."""
        del self._made[id(block)]

    def release(
        self,
        buffer: Buffer,
        streams: CommStreams,
        owner: Stream,
        after: StreamEvent | None = None,
        *,
        keep: int = 0,
    ) -> None:
        """Keep the block of ``buffer`` for the next one, if it is a block of a pool."""
        if buffer.block is not None:
            self.put_back(buffer.block)
        else:
            super().release(buffer, streams, owner, after, keep=keep)


def allocate_from(
    comm: BufferMemory, numel: int, *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A flat buffer from a collective's own ``allocate``.

    Raises:
        TypeError: if what it gave is no tensor.
        ValueError: if it is not a contiguous tensor of this size, dtype and device.
    """
    buffer = comm.allocate((numel,), dtype=dtype, device=device)
    if not isinstance(buffer, torch.Tensor):
        raise TypeError(f"{comm.allocates} gave a {type(buffer).__name__}; return a tensor.")
    if (
        buffer.shape != (numel,)
        or buffer.dtype is not dtype
        or buffer.device != device
        or not buffer.is_contiguous()
        or buffer.storage_offset() * dtype.itemsize % 16
    ):
        raise ValueError(
            f"{comm.allocates} gave {tuple(buffer.shape)} {buffer.dtype} on "
            f"{buffer.device} at storage offset {buffer.storage_offset()}; asked for ({numel},) "
            f"{dtype} on {device}, contiguous, at an offset that is a multiple of 16 bytes. Return "
            "torch.empty(size, dtype=dtype, device=device) or the like."
        )
    return buffer

"""The flat buffers of a collective, their views, and a pool that keeps both for the next one.

Owns: memory that travels. Where one collective follows another, new memory each time costs page
faults and the making of the same views: a pool hands out the same few blocks instead. Refuses:
knowing when a collective is over: who took buffers gives them back then.
"""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import torch

from fullshard.comm.buffers.allocator import Allocates, allocate_from
from fullshard.comm.layouts import views
from fullshard.comm.layouts.layout import Layout
from fullshard.comm.layouts.side_by_side import even_ranks
from fullshard.comm.runtime.blocks import BlockPool

__all__ = ["BufferPool", "BufferSource", "Buffers", "NewBuffers"]

_VIEWS = ("slices", "all_slices", "shards", "pieces", "all_pieces", "gaps", "stacked", "marks")


class Buffers:
    """The buffers of one collective of one layout, and views of them, each made once.

    Attributes:
        tensors: one flat tensor per ``layout.buffers``, ``[world * slice_numel]``.
        layout: where things lie.
        rank: whose slice is this process's own.
        block: the memory that they lie in; None if they are memory of their own.
        tails: by what marks hold, what stands behind the tensors in ``stacked``; see ``packing``.
    """

    def __init__(
        self,
        tensors: tuple[torch.Tensor, ...],
        layout: Layout,
        rank: int,
        block: torch.Tensor | None = None,
    ) -> None:
        self.tensors = tensors
        self.layout = layout
        self.rank = rank
        self.block = block
        self.tails: dict[float, tuple[torch.Tensor, ...]] = {}

    @cached_property
    def slices(self) -> tuple[torch.Tensor, ...]:
        """This rank's slice of each."""
        return tuple(
            tensor.narrow(0, self.rank * spec.slice_numel, spec.slice_numel)
            for tensor, spec in zip(self.tensors, self.layout.buffers, strict=True)
        )

    @cached_property
    def all_slices(self) -> tuple[torch.Tensor, ...]:
        """The slices of the one buffer, in the order of ranks."""
        (tensor,) = self.tensors
        return tensor.view(self.layout.world_size, -1).unbind()

    @property
    def lent(self) -> tuple[torch.Tensor, ...]:
        """What a gather hands out beside ``tensors``."""
        return (*self.slices, *self.__dict__.get("all_slices", ()))

    @cached_property
    def shards(self) -> list[torch.Tensor]:
        """Per tensor of the layout, where this rank's shard lies in its slice."""
        return views.shard_views(self.slices, self.layout, self.rank)

    @cached_property
    def pieces(self) -> list[list[torch.Tensor]]:
        """Per tensor of the layout, where its pieces lie; see ``views.piece_views``."""
        return views.piece_views(self.tensors, self.layout)

    @cached_property
    def all_pieces(self) -> list[torch.Tensor]:
        """``pieces`` of all tensors, one after the other."""
        return [view for piece in self.pieces for view in piece]

    @cached_property
    def gaps(self) -> list[torch.Tensor]:
        """All that no shard and no mark fills."""
        return views.gap_views(self.tensors, self.layout)

    @cached_property
    def stacked(self) -> torch.Tensor | None:
        """The slices of ``even_ranks`` in the last buffer, ``[ranks, slice_numel]``, if any."""
        ranks = even_ranks(self.layout)
        rows = self.tensors[-1].view(self.layout.world_size, -1)
        return rows.narrow(0, 0, ranks) if ranks else None

    @cached_property
    def marks(self) -> torch.Tensor:
        """The marks of the last buffer, ``[world, marks]``."""
        return views.marks_view(self.tensors[-1], self.layout)

    def drop_views(self) -> tuple[torch.Tensor, ...]:
        """The tensors, which nothing here refers to by a view any more."""
        for name in _VIEWS:
            self.__dict__.pop(name, None)
        return self.tensors


class BufferSource(Protocol):
    """Where do the buffers of a collective come from, and where do they go when it is over?"""

    def take(
        self,
        comm: Allocates,
        layout: Layout,
        rank: int,
        device: torch.device,
    ) -> Buffers:
        """Returns buffers for ``layout``; their contents may be anything.

        Args:
            comm: whose ``allocate`` new memory comes from.
            layout: where things lie.
            rank: whose slice is this process's own.
            device: where the memory is.
        """
        ...

    def give_back(self, buffers: Buffers) -> bool:
        """Takes ``buffers`` of a finished collective back, and tells whether it keeps them."""
        ...


class NewBuffers:
    """New memory each time, from the collective's own ``allocate``."""

    def take(
        self,
        comm: Allocates,
        layout: Layout,
        rank: int,
        device: torch.device,
    ) -> Buffers:
        """Returns new buffers.

        Raises:
            ValueError: if ``allocate`` gave something that cannot serve.
        """
        tensors = tuple(
            allocate_from(comm, spec.slice_numel * layout.world_size, spec.dtype, device)
            for spec in layout.buffers
        )
        return Buffers(tensors, layout, rank)

    def give_back(self, buffers: Buffers) -> bool:
        """Returns False: nothing is kept."""
        return False


_ALIGNMENT = 64  # bytes between two buffers in one block


class _Made:
    """What was made for one layout: how large a block must be, and buffers by block and rank."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout  # kept, as it is known by its identity
        self.offsets = _offsets(layout)
        self.nbytes = self.offsets[-1]
        self.buffers: dict[tuple[int, int], Buffers] = {}


class BufferPool(NewBuffers):
    """A few blocks of memory that collectives use one after the other, with their views.

    There are as many blocks as were ever in use at once, each as large as it had to be. A
    collective whose ``allocate`` says nothing about reuse gets new memory, as one of a user's may
    mean each buffer to be new; the default ones say so by ``reusable``. For devices without
    streams: blocks carry no events.
    """

    def __init__(self) -> None:
        """Starts without memory."""
        self._blocks = BlockPool(self._forget)
        self._made: dict[int, _Made] = {}  # by the identity of a layout: a step hashes none

    def take(self, comm: Allocates, layout: Layout, rank: int, device: torch.device) -> Buffers:
        """Returns buffers in the smallest free block that holds them, or in a new one."""
        if not getattr(comm, "reusable", False):
            return super().take(comm, layout, rank, device)
        made = self._made.get(id(layout))
        if made is None:
            made = self._made[id(layout)] = _Made(layout)
        block = self._blocks.take(made.nbytes)
        buffers = None if block is None else made.buffers.get((id(block), rank))
        return self._make(made, block, comm, rank, device) if buffers is None else buffers

    def _make(
        self,
        made: _Made,
        block: torch.Tensor | None,
        comm: Allocates,
        rank: int,
        device: torch.device,
    ) -> Buffers:
        layout = made.layout
        with torch.inference_mode(False):  # an inference tensor could not be written in training
            if block is None:
                block = allocate_from(comm, made.nbytes, torch.uint8, device)
            tensors = tuple(
                block.narrow(0, start, spec.slice_nbytes * layout.world_size).view(spec.dtype)
                for start, spec in zip(made.offsets[:-1], layout.buffers, strict=True)
            )
        buffers = made.buffers[id(block), rank] = Buffers(tensors, layout, rank, block)
        return buffers

    def _forget(self, block: torch.Tensor) -> None:
        """Drops the views of a block that went, and layouts of which no views are left."""
        for made in self._made.values():
            made.buffers = {k: each for k, each in made.buffers.items() if k[0] != id(block)}
        self._made = {key: made for key, made in self._made.items() if made.buffers}

    def give_back(self, buffers: Buffers) -> bool:
        """Keeps the block of ``buffers``, if it is one of a pool's."""
        if buffers.block is None:
            return False
        self._blocks.free.append(buffers.block)
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that nobody uses now."""
        return self._blocks.nbytes


def _offsets(layout: Layout) -> list[int]:
    """Where each buffer begins in a block, and the end of the last."""
    offsets = [0]
    for spec in layout.buffers:
        nbytes = spec.slice_nbytes * layout.world_size
        offsets.append(offsets[-1] + -(-nbytes // _ALIGNMENT) * _ALIGNMENT)
    return offsets

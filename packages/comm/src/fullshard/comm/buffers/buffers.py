"""The flat buffers of a collective, their views, and a pool that keeps both for the next one.

Owns: memory that travels. Where one collective follows another, new memory each time costs page
faults and the making of the same views: a pool hands out the same few blocks instead. Refuses:
knowing when a collective is over: who took buffers gives them back then.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import torch

from fullshard.comm.buffers.allocator import Allocates, allocate_from
from fullshard.comm.layouts import views
from fullshard.comm.layouts.layout import Layout
from fullshard.comm.layouts.side_by_side import even_ranks
from fullshard.comm.runtime import compat
from fullshard.comm.runtime.blocks import BlockPool

__all__ = ["BufferPool", "BufferSource", "Buffers", "NewBuffers"]

_VIEWS = ("slices", "all_slices", "shards", "pieces", "all_pieces", "gaps", "stacked", "marks")


class Buffers:
    """The buffers of one collective of one layout.

    Attributes:
        tensors: one flat tensor per ``layout.buffers``, each of ``ranks`` slices.
        layout: where things lie.
        rank: whose slice is this process's own.
        ranks: of how many ranks, the first ones, they have slices.
        block: the memory that they lie in; None if they are memory of their own.
        padded: whether the gaps hold zeros.
        marked: what all marks hold; None: anything.
    """

    def __init__(
        self,
        tensors: tuple[torch.Tensor, ...],
        layout: Layout,
        rank: int,
        block: torch.Tensor | None = None,
        ranks: int | None = None,
    ) -> None:
        self.tensors = tensors
        self.layout = layout
        self.rank = rank
        self.ranks = layout.world_size if ranks is None else ranks
        self.block = block
        self.padded = False
        self.marked: float | None = None
        self._tail: tuple[float, tuple[torch.Tensor, ...]] | None = None

    @cached_property
    def slices(self) -> tuple[torch.Tensor, ...]:
        """This rank's slice of each; nothing of any if they have none of its."""
        present = int(self.rank < self.ranks)
        return tuple(
            tensor.narrow(0, present * self.rank * spec.slice_numel, present * spec.slice_numel)
            for tensor, spec in zip(self.tensors, self.layout.buffers, strict=True)
        )

    @cached_property
    def all_slices(self) -> tuple[torch.Tensor, ...]:
        """The slices of the one buffer, in the order of ranks."""
        (tensor,) = self.tensors
        return tensor.view(self.ranks, -1).unbind()

    @property
    def lent(self) -> tuple[torch.Tensor, ...]:
        """What a gather hands out beside ``tensors``."""
        return self.slices if self.ranks == self.layout.world_size else self.all_slices

    @cached_property
    def shards(self) -> list[torch.Tensor]:
        """Per tensor of the layout, where this rank's shard lies in its slice."""
        return views.shard_views(self.slices, self.layout, self.rank)

    @cached_property
    def pieces(self) -> list[list[torch.Tensor]]:
        """Per tensor of the layout, where its pieces lie; see ``views.piece_views``."""
        return views.piece_views(self.tensors, self.layout, range(self.ranks))

    @cached_property
    def all_pieces(self) -> list[torch.Tensor]:
        """``pieces`` of all tensors, one after the other."""
        return [view for piece in self.pieces for view in piece]

    @cached_property
    def gaps(self) -> list[torch.Tensor]:
        """All that no shard and no mark fills."""
        return views.gap_views(self.tensors, self.layout, range(self.ranks))

    def pad(self) -> None:
        """Fills the gaps with zeros, unless an earlier collective left them there.

        A row cut over many ranks is mostly padding: zeros are much of what a reduction writes.
        """
        if not self.padded:
            compat.foreach_zero(self.gaps)
            self.padded = True

    def mark(self, value: float, missing: Sequence[int]) -> None:
        """Fills the marks with ``value``, unless they hold it; those of ``missing`` with zeros."""
        if self.marked != value:
            self.marks.fill_(value)
        for index in missing:
            self.marks[:, index].zero_()
        self.marked = None if missing else value

    def forget(self) -> None:
        """Takes notice that others may have written here."""
        self.padded = False
        self.marked = None

    @cached_property
    def stacked(self) -> torch.Tensor:
        """The slices of ``even_ranks`` in the last buffer, ``[ranks, slice_numel]``."""
        rows = self.tensors[-1].view(self.ranks, -1)
        return rows.narrow(0, 0, even_ranks(self.layout))

    def tail(self, mark: float) -> tuple[torch.Tensor, ...]:
        """What stands in ``stacked`` behind all tensors: ``[ranks, n]``, or none if n is 0.

        Marks, all of them ``mark``, then zeros. A copy, to be put side by side with tensors.
        """
        made = self._tail
        if made is None or made[0] != mark:
            layout, spec = self.layout, self.layout.buffers[-1]
            behind = spec.slice_numel - layout.marks_offset // spec.dtype.itemsize
            tail = self.stacked.new_zeros(self.stacked.shape[0], behind)
            tail[:, : layout.marks] = mark
            self._tail = made = mark, (tail,) if behind else ()
        return made[1]

    @cached_property
    def marks(self) -> torch.Tensor:
        """The marks of the last buffer, ``[ranks, marks]``."""
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
        ranks: int | None = None,
    ) -> Buffers:
        """Returns buffers for ``layout``; their contents may be anything.

        Args:
            comm: whose ``allocate`` new memory comes from.
            layout: where things lie.
            rank: whose slice is this process's own.
            device: where the memory is.
            ranks: of how many ranks, the first ones, there are slices; None: of all.
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
        ranks: int | None = None,
    ) -> Buffers:
        """Returns new buffers.

        Raises:
            ValueError: if ``allocate`` gave something that cannot serve.
        """
        ranks = layout.world_size if ranks is None else ranks
        tensors = tuple(
            allocate_from(comm, spec.slice_numel * ranks, spec.dtype, device)
            for spec in layout.buffers
        )
        return Buffers(tensors, layout, rank, ranks=ranks)

    def give_back(self, buffers: Buffers) -> bool:
        """Returns False: nothing is kept."""
        return False


_ALIGNMENT = 64  # bytes between two buffers in one block
_MOST_PADDED = 2  # as many as travel at once


class BufferPool(NewBuffers):
    """A few blocks of memory that collectives use one after the other, with their views.

    There are as many blocks as were ever in use at once, each as large as it had to be. A
    collective whose ``allocate`` says nothing about reuse gets new memory, as one of a user's may
    mean each buffer to be new; the default ones say so by ``reusable``. For devices without
    streams: blocks carry no events.

    The last two whose gaps are more than half of them, and hold zeros, wait for their own layout:
    filling the gaps again would be most of the work.
    """

    def __init__(self) -> None:
        """Starts without memory."""
        self._blocks = BlockPool(self._forget)
        self._made: dict[tuple[int, Layout, int, int], Buffers] = {}
        self._padded: list[Buffers] = []

    def take(
        self,
        comm: Allocates,
        layout: Layout,
        rank: int,
        device: torch.device,
        ranks: int | None = None,
    ) -> Buffers:
        """Returns buffers in the smallest free block that holds them, or in a new one."""
        ranks = layout.world_size if ranks is None else ranks
        if not getattr(comm, "reusable", False):
            return super().take(comm, layout, rank, device, ranks)
        for place, kept in enumerate(self._padded):
            if kept.layout == layout and (kept.rank, kept.ranks) == (rank, ranks):
                return self._padded.pop(place)
        block = self._blocks.take(_nbytes(layout, ranks))
        made = None if block is None else self._made.get((id(block), layout, rank, ranks))
        if made is None:
            return self._make(block, comm, layout, rank, device, ranks)
        made.forget()
        return made

    def _make(
        self,
        block: torch.Tensor | None,
        comm: Allocates,
        layout: Layout,
        rank: int,
        device: torch.device,
        ranks: int,
    ) -> Buffers:
        with torch.inference_mode(False):  # an inference tensor could not be written in training
            if block is None:
                block = allocate_from(comm, _nbytes(layout, ranks), torch.uint8, device)
            made = Buffers(_cut(block, layout, ranks), layout, rank, block, ranks)
        self._made[id(block), layout, rank, ranks] = made
        return made

    def _forget(self, block: torch.Tensor) -> None:
        """Drops the views of a block that went."""
        self._made = {key: made for key, made in self._made.items() if key[0] != id(block)}

    def give_back(self, buffers: Buffers) -> bool:
        """Keeps the block of ``buffers``, if it is one of a pool's."""
        if buffers.block is None:
            return False
        kept = self._padded
        if not (buffers.padded and views.is_mostly_gaps(buffers.layout, buffers.ranks)):
            self._blocks.give_back(buffers.block)
            return True
        kept.append(buffers)
        if len(kept) > _MOST_PADDED and (block := kept.pop(0).block) is not None:
            self._blocks.give_back(block)
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that nobody uses now."""
        padded = sum(kept.block.numel() for kept in self._padded if kept.block is not None)
        return self._blocks.nbytes + padded


def _offsets(layout: Layout, ranks: int) -> list[int]:
    """Where each buffer begins in a block, and the end of the last."""
    offsets = [0]
    for spec in layout.buffers:
        nbytes = spec.slice_nbytes * ranks
        offsets.append(offsets[-1] + -(-nbytes // _ALIGNMENT) * _ALIGNMENT)
    return offsets


@functools.lru_cache(maxsize=1024)
def _nbytes(layout: Layout, ranks: int) -> int:
    return _offsets(layout, ranks)[-1]


def _cut(block: torch.Tensor, layout: Layout, ranks: int) -> tuple[torch.Tensor, ...]:
    return tuple(
        block.narrow(0, start, spec.slice_nbytes * ranks).view(spec.dtype)
        for start, spec in zip(_offsets(layout, ranks)[:-1], layout.buffers, strict=True)
    )

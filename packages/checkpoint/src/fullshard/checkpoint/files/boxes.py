"""Boxes: which part of a tensor a rank has, an interval along each dim; pure arithmetic.

Owns the box of a shard, read from its cuts, and how a box lies in the bytes of a file. It reads
no file and sends nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.cuts import Cut, cuts_of

__all__ = ["Box", "Sharing", "box_of", "divided", "run_starts", "runs_of", "sharing_of", "span_of"]


@dataclass(frozen=True)
class Box:
    """A part of a tensor: along each dim, where it starts and how many indices it has."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Returns the box of a whole tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """How many elements it has; 1 for a tensor without dims."""
        return math.prod(self.size)

    def overlap(self, other: Box) -> Box | None:
        """Returns what is in both; None if nothing is."""
        starts = tuple(map(max, self.start, other.start))
        ends = [
            min(a + m, b + n)
            for a, m, b, n in zip(self.start, self.size, other.start, other.size, strict=True)
        ]
        if any(end <= start for start, end in zip(starts, ends, strict=True)):
            return None
        return Box(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))

    def along(self, dim: int, start: int, size: int) -> Box:
        """Returns the box with another interval along ``dim``."""
        starts, sizes = list(self.start), list(self.size)
        starts[dim], sizes[dim] = start, size
        return Box(tuple(starts), tuple(sizes))

    def within(self, outer: Box) -> Box:
        """Returns the same part, counted from the start of ``outer``."""
        starts = (mine - theirs for mine, theirs in zip(self.start, outer.start, strict=True))
        return Box(tuple(starts), self.size)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns this part of ``tensor``, a view."""
        for dim, (start, size) in enumerate(zip(self.start, self.size, strict=True)):
            if size != tensor.size(dim):
                tensor = tensor.narrow(dim, start, size)
        return tensor


# -- shards ---------------------------------------------------------------------------------------


def box_of(tensor: torch.Tensor) -> Box:
    """Returns the part of the whole tensor that this rank has; all of a plain tensor."""
    box = Box.whole(tensor.shape)
    if not isinstance(tensor, DTensor):
        return box
    if tensor.device_mesh.get_coordinate() is None:  # other ranks have it
        return Box(box.start, (0,) * len(box.size))
    for cut in cuts_of(tensor):
        box = _chunk(box, cut, cut.index)
    return box


def _chunk(box: Box, cut: Cut, index: int) -> Box:
    rows = -(-cut.size // cut.count)
    start = min(index * rows, cut.size)
    return box.along(cut.dim, box.start[cut.dim] + start, min(rows, cut.size - start))


@dataclass(frozen=True)
class Sharing:
    """Ranks along one axis of a mesh, whose shards make one larger box.

    Attributes:
        axis: of the mesh.
        box: all that they have together.
        boxes: what each of them has, by its position along the axis.
        index: the position of this rank.
    """

    axis: int
    box: Box
    boxes: tuple[Box, ...]
    index: int


def sharing_of(tensor: torch.Tensor) -> list[Sharing]:
    """Returns, for each dim that is cut, the ranks along the axis of the mesh that cuts it last.

    They all find the same.
    """
    found: list[Sharing] = []
    if not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is None:
        return found
    cuts, own = cuts_of(tensor), box_of(tensor)
    for dim in sorted({cut.dim for cut in cuts}):
        before = Box.whole(tensor.shape)
        *earlier, last = [cut for cut in cuts if cut.dim == dim]
        for cut in earlier:
            before = _chunk(before, cut, cut.index)
        union = own.along(dim, before.start[dim], before.size[dim])
        boxes = tuple(_chunk(union, last, index) for index in range(last.count))
        found.append(Sharing(last.axis, union, boxes, last.index))
    return found


# -- bytes ----------------------------------------------------------------------------------------


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def runs_of(box: Box, shape: Sequence[int]) -> tuple[int, int]:
    """Returns how many runs of neighbouring elements a box has in a tensor of ``shape``, how long.

    All are of one length. Elements lie in the order of the dims, the last one fastest.
    """
    length, dim = 1, len(shape)
    while dim > 0:
        dim -= 1
        length *= box.size[dim]
        if box.size[dim] != shape[dim]:
            break
    return math.prod(box.size[:dim]), length


def run_starts(box: Box, shape: Sequence[int]) -> Iterator[int]:
    """Yields the first element of each run, counted from the tensor's first."""
    strides, dim = _strides(shape), len(shape)
    while dim > 0:
        dim -= 1
        if box.size[dim] != shape[dim]:
            break
    first = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
    for index in itertools.product(*map(range, box.size[:dim])):
        yield first + sum(i * stride for i, stride in zip(index, strides, strict=False))


def span_of(box: Box, shape: Sequence[int]) -> tuple[int, int]:
    """Returns the first element of a box that is not empty, and how many there are to its last."""
    pairs = list(zip(box.start, box.size, _strides(shape), strict=True))
    first = sum(start * stride for start, _, stride in pairs)
    return first, 1 + sum((size - 1) * stride for _, size, stride in pairs)


def divided(box: Box, cost: Callable[[Box], int], limit: int) -> Iterator[Box]:
    """Yields parts of ``box``, in the order of their elements, none of which costs over ``limit``.

    Each is cut along the first dims only, so a part of neighbouring elements is one, too. A single
    element may cost more.
    """
    if cost(box) <= limit or box.numel <= 1:
        if box.numel > 0:
            yield box
        return
    dim = next(dim for dim, size in enumerate(box.size) if size > 1)
    row = cost(box.along(dim, box.start[dim], 1))
    two = cost(box.along(dim, box.start[dim], 2))
    rows = 1 + max(0, limit - row) // max(1, two - row)
    for start in range(0, box.size[dim], rows):
        part = box.along(dim, box.start[dim] + start, min(rows, box.size[dim] - start))
        if rows > 1:
            yield part
        else:
            yield from divided(part, cost, limit)

"""Ranks whose shards are neighbours in one dim: the ranks of one axis of a mesh.

Owns which box they have together, and which part of it each has; it sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.boxes import Box, box_of, cuts_of

__all__ = ["Sharing", "sharing_of"]


@dataclass(frozen=True)
class Sharing:
    """Ranks of one axis of a mesh whose shards together form one larger box.

    Attributes:
        axis: of the mesh.
        box: all that they have together.
        boxes: the box of each rank, by its position on the axis.
        index: the position of this rank.
    """

    axis: int
    box: Box
    boxes: tuple[Box, ...]
    index: int


def sharing_of(tensor: torch.Tensor) -> list[Sharing]:
    """Return, for each dim that is cut, the ranks on the mesh axis of the last cut.

    These ranks all compute equal results.
    """
    found: list[Sharing] = []
    if not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is None:
        return found
    cuts, own = cuts_of(tensor), box_of(tensor)
    for dim in sorted({cut.dim for cut in cuts}):
        before = Box.whole(tensor.shape)
        *earlier, last = [cut for cut in cuts if cut.dim == dim]
        for cut in earlier:
            before = before.chunk(cut, cut.index)
        union = own.along(dim, before.start[dim], before.size[dim])
        boxes = tuple(union.chunk(last, index) for index in range(last.count))
        found.append(Sharing(last.axis, union, boxes, last.index))
    return found

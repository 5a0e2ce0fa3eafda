"""Which elements of a stored tensor a box is: runs of neighbours, and the gaps between them.

Computes where the elements of a box are in the bytes of a file; the last dim varies fastest. Reads
no file.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from fullshard.checkpoint.boxes import Box

__all__ = ["divided", "run_starts", "runs_of", "span_of"]


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def runs_of(box: Box, shape: Sequence[int]) -> tuple[int, int]:
    """Return how many runs of neighbouring elements a box has in a tensor of ``shape``, how long.

    The runs are equally long. Elements are stored in the order of the dims; the last dim varies
    fastest.
    """
    length, dim = 1, len(shape)
    while dim > 0:
        dim -= 1
        length *= box.size[dim]
        if box.size[dim] != shape[dim]:
            break
    return math.prod(box.size[:dim]), length


def run_starts(box: Box, shape: Sequence[int]) -> Iterator[int]:
    """Yield the first element of each run, counted from the tensor's first."""
    strides, dim = _strides(shape), len(shape)
    while dim > 0:
        dim -= 1
        if box.size[dim] != shape[dim]:
            break
    first = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
    for index in itertools.product(*map(range, box.size[:dim])):
        yield first + sum(i * stride for i, stride in zip(index, strides, strict=False))


def span_of(box: Box, shape: Sequence[int]) -> tuple[int, int]:
    """Return the first element of a box that is not empty, and how many there are to its last."""
    pairs = list(zip(box.start, box.size, _strides(shape), strict=True))
    first = sum(start * stride for start, _, stride in pairs)
    return first, 1 + sum((size - 1) * stride for _, size, stride in pairs)


def divided(box: Box, cost: Callable[[Box], int], limit: int) -> Iterator[Box]:
    """Yield parts of ``box``, in the order of their elements, none of which costs over ``limit``.

    The box is divided in its first dims, so a part of a contiguous box is contiguous. A single
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

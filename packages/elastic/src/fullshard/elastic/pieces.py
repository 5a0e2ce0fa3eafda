"""Which rows of which tensors two ranks of different groups both hold.

Owns the arithmetic, by the rule of comm's layouts: groups may have different numbers of ranks.
Refuses: moving anything.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import torch

from fullshard.comm import Layout, TensorSpec
from fullshard.comm.spi import own_mask, shard_views

__all__ = [
    "Peer",
    "copied_into",
    "packed",
    "packed_numel",
    "pairs_with",
    "shared_rows",
    "specs_digest",
]


@dataclass(frozen=True, slots=True)
class Peer:
    """A rank of a group.

    Attributes:
        rank: in its group.
        ranks: how many the group has.
    """

    rank: int
    ranks: int


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one tensor: its index, and the first and last row (excluded) of the full tensor."""

    index: int
    start: int
    stop: int


def pairs_with(here: Peer, there: Peer) -> bool:
    """Return whether two ranks exchange what every rank of their groups has alike.

    Each rank of the smaller group pairs with one rank or more of the other, and each rank of the
    larger group with one.
    """
    smaller = min(here.ranks, there.ranks)
    return here.rank % smaller == there.rank % smaller


@functools.lru_cache(maxsize=4096)
def shared_rows(specs: tuple[TensorSpec, ...], here: Peer, there: Peer) -> tuple[_Rows, ...]:
    """Return the rows of each tensor that both hold."""
    found = []
    for index, spec in enumerate(specs):
        start = max(spec.first_row(each.rank, each.ranks) for each in (here, there))
        stop = min(spec.first_row(each.rank + 1, each.ranks) for each in (here, there))
        if start < stop and spec.numel:
            found.append(_Rows(index, start, stop))
    return tuple(found)


def _views(output: torch.Tensor, layout: Layout, here: Peer, there: Peer) -> list[torch.Tensor]:
    """Return the parts of a slice ``output`` of ``here`` that ``there`` holds, too, and the mask.

    The mask goes between ranks that pair, as every rank of a group has the same.
    """
    shards = shard_views(output, layout, here.rank)
    parts = []
    for rows in shared_rows(layout.specs, here, there):
        spec = layout.specs[rows.index]
        first = spec.first_row(here.rank, here.ranks)
        parts.append(
            shards[rows.index].narrow(spec.dim, rows.start - first, rows.stop - rows.start)
        )
    if layout.mask_numel and pairs_with(here, there):
        parts.append(own_mask(output, layout))
    return parts


def packed(
    output: torch.Tensor, layout: Layout, here: Peer, there: Peer, dtype: torch.dtype
) -> torch.Tensor:
    """Return what ``here`` sends to ``there`` of its slice ``output``, flat, in ``dtype``."""
    if here == there and dtype is output.dtype:
        return output
    if here == there:
        return output.to(dtype)
    parts = [part.reshape(-1) for part in _views(output, layout, here, there)]
    return torch.cat(parts).to(dtype) if parts else output.new_empty(0, dtype=dtype)


def copied_into(
    output: torch.Tensor, came: torch.Tensor, layout: Layout, here: Peer, there: Peer
) -> None:
    """Copy what ``there`` packed for ``here`` to its places in ``output``, a slice of ``here``."""
    if here == there:
        output.copy_(came)
        return
    start = 0
    for part in _views(output, layout, here, there):
        part.copy_(came[start : start + part.numel()].view(part.shape))
        start += part.numel()


def packed_numel(layout: Layout, here: Peer, there: Peer) -> int:
    """Return how many elements ``packed`` gives."""
    if here == there:
        return layout.buffer.slice_numel
    rows = shared_rows(layout.specs, here, there)
    numel = sum((each.stop - each.start) * layout.specs[each.index].row_numel for each in rows)
    return numel + (layout.mask_numel if pairs_with(here, there) else 0)


@functools.lru_cache(maxsize=1024)
def specs_digest(specs: tuple[TensorSpec, ...], mask_numel: int) -> str:
    """Return a text that differs, most probably, for other tensors or another mask."""
    text = repr([mask_numel, *[(spec.shape, str(spec.dtype), spec.dim) for spec in specs]])
    return hashlib.blake2b(text.encode(), digest_size=7).hexdigest()

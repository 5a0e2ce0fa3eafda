"""Layouts in which a slice is its tensors' rows side by side, so that one call packs them all.

Owns the question for which ranks that is so, and what stands behind the rows. Refuses: copying.
"""

from __future__ import annotations

import functools

import torch

from fullshard.comm.layouts.layout import Layout

__all__ = ["even_ranks", "tail_of"]


@functools.lru_cache(maxsize=4096)
def even_ranks(layout: Layout) -> int:
    """How many ranks, the first ones, have everything, and equally many rows of each tensor.

    Then the slices of these ranks are the tensors, seen as ``[ranks, -1]``, side by side. The
    result is the number of all ranks if it divides every dim 0, and fewer if dim 0 is equally small
    for all tensors. The result is 0 if tensors differ in dim 0, are cut on another dim, or are not
    stored in this order.
    """
    found, end = set(), 0
    for spec, extent in zip(layout.specs, layout.extents, strict=True):
        if not spec.shape or spec.dim or extent.offset != end or not spec.numel:
            return 0
        chunk = spec.chunk_rows(layout.world_size)
        if spec.rows % chunk:
            return 0
        found.add(spec.rows // chunk)
        end += chunk * spec.row_numel * spec.dtype.itemsize
    return 0 if end != layout.mask_offset or len(found) > 1 else found.pop()


@functools.lru_cache(maxsize=1024)
def tail_of(layout: Layout, used: float, device: torch.device) -> torch.Tensor | None:
    """Return the elements behind all tensors of an even layout, ``[world, n]``; None if n is 0.

    A slice ends with a mask of ``used``, then zeros. The result is cached and read-only.
    """
    spec = layout.buffer
    behind = spec.slice_numel - layout.mask_offset // spec.dtype.itemsize
    if not behind:
        return None
    with torch.inference_mode(False):  # callers outside inference mode use it too
        tail = torch.zeros(layout.world_size, behind, dtype=spec.dtype, device=device)
        tail[:, : layout.mask_numel] = used
    return tail

"""The rank-major layout: one buffer, in which each rank's slice holds its shard of every tensor.

Owns: the arithmetic of dtype runs, alignment and padding. This module is pure mathematics, like
every layout. Refuses: moving data (``gather`` and ``reduce`` do).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from fullshard.comm.layouts.layout import BufferSpec, Extent, TensorSpec, pieces_of

__all__ = ["RankMajorLayout", "rank_major"]

_ALIGNMENT = 16  # bytes, on which runs and slices start: the widest element


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class RankMajorLayout:
    """A buffer in which each rank's slice holds its shards of all tensors, one after another.

    Tensors are ordered in runs of equal dtype (in order of first appearance, stable inside a run).
    Every run starts on a multiple of 16 bytes, so one launch can move any mix of dtypes. A tensor
    takes ``chunk_rows * row_numel`` elements of each slice, whether or not a rank's shard fills
    them. The slice is padded to 16 bytes. Do not change the attributes.

    Attributes:
        specs: the tensors, in the order in which they were given.
        world_size: number of ranks.
        buffer: its dtype and size.
        extents: one per tensor, in the order of ``specs``.
        mask_numel: elements of the used-parameter mask in each rank's slice.
        mask_offset: bytes from the start of a slice to its mask: where the tensors end.

    Args:
        specs: the full tensors; at least one.
        world_size: number of ranks, at least 1.
        mask_numel: elements of the used-parameter mask, of the buffer's dtype, at the end of each
            rank's slice. Only legal if all dtypes are equal.

    Raises:
        ValueError: if an argument violates a condition above.
    """

    def __init__(
        self, specs: Sequence[TensorSpec], world_size: int, *, mask_numel: int = 0
    ) -> None:
        self.specs = tuple(specs)
        self.world_size = world_size
        self.mask_numel = mask_numel
        self._validate()
        dtypes = tuple(dict.fromkeys(spec.dtype for spec in self.specs))
        uniform = dtypes[0] if len(dtypes) == 1 else torch.uint8
        offsets: dict[int, int] = {}
        end = 0
        for dtype in dtypes:
            end = _round_up(end)
            for index, spec in enumerate(self.specs):
                if spec.dtype is dtype:
                    offsets[index] = end
                    end += spec.chunk_rows(world_size) * spec.row_numel * dtype.itemsize
        self.mask_offset = end
        end = _round_up(end + mask_numel * uniform.itemsize)
        self.buffer = BufferSpec(dtype=uniform, slice_numel=end // uniform.itemsize)
        self.extents = tuple(
            Extent(offset=offsets[index], pieces=pieces_of(spec, world_size))
            for index, spec in enumerate(self.specs)
        )
        # A layout is the key of per-step caches; hashing hundreds of specs at every step would be
        # planning on the hot path.
        self._hash = hash(self._key())

    def _validate(self) -> None:
        if not self.specs:
            raise ValueError(
                "RankMajorLayout got no tensors; it needs at least one TensorSpec. Skip the "
                "collective when there is nothing to move."
            )
        if not isinstance(self.world_size, int) or self.world_size < 1:
            raise ValueError(
                f"RankMajorLayout got world_size {self.world_size!r}; it must be an int >= 1. "
                "Pass process_group.size()."
            )
        if not isinstance(self.mask_numel, int) or self.mask_numel < 0:
            raise ValueError(
                f"RankMajorLayout got mask_numel {self.mask_numel!r}; it must be an int >= 0, "
                "usually 0 or the number of tensors."
            )
        dtypes = {str(spec.dtype) for spec in self.specs}
        if self.mask_numel and len(dtypes) > 1:
            raise ValueError(
                f"RankMajorLayout got mask_numel={self.mask_numel} with mixed dtypes "
                f"{sorted(dtypes)}; a mask needs one dtype, because it is reduced with the "
                "tensors. Use one layout per dtype."
            )

    def __eq__(self, other: object) -> bool:
        """Whether ``other`` is a rank-major layout with equal tensors, world and mask."""
        if not isinstance(other, RankMajorLayout):
            return NotImplemented
        return self is other or self._key() == other._key()

    def __hash__(self) -> int:
        """The hash computed at construction."""
        return self._hash

    def __repr__(self) -> str:
        """A short text: number of tensors, world size, mask and bytes per rank."""
        return (
            f"RankMajorLayout({len(self.specs)} tensors, world_size={self.world_size}, "
            f"mask_numel={self.mask_numel}, slice={self.buffer.slice_nbytes} bytes of "
            f"{self.buffer.dtype})"
        )

    def _key(self) -> tuple[tuple[TensorSpec, ...], int, int]:
        return (self.specs, self.world_size, self.mask_numel)


@functools.lru_cache(maxsize=1024)
def rank_major(
    specs: tuple[TensorSpec, ...], world_size: int, mask_numel: int = 0
) -> RankMajorLayout:
    """Return one layout object for equal arguments, so that caches per layout are found."""
    return RankMajorLayout(specs, world_size, mask_numel=mask_numel)

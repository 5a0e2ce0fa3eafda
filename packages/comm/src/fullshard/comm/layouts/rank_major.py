"""The rank-major layout: one buffer, in which each rank's slice holds its shard of every tensor.

Owns: the arithmetic of dtype runs, alignment and padding. It is pure mathematics, as every layout.
Refuses: moving data (``gather`` and ``reduce`` do).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.comm.layouts.layout import BufferSpec, Extent, TensorSpec, pieces_of

__all__ = ["RankMajorLayout"]

_SLICE_ALIGNMENT = 16


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class RankMajorLayout:
    """One buffer in which each rank's slice holds its shard of every tensor, one after another.

    Tensors lie in runs of equal dtype (in order of first appearance, stable inside a run) and every
    run starts on a multiple of ``alignment`` bytes, so any mix of dtypes travels in one launch. A
    tensor takes ``chunk_rows * row_numel`` elements of each slice, whether or not a rank's shard
    fills them. The slice is padded to ``alignment``.

    Attributes (not to be changed):
        specs: the tensors, in the order in which they were given.
        world_size: number of ranks.
        buffer: its dtype and size.
        extents: one per tensor, in the order of ``specs``.
        mask_numel: elements of the used-parameter mask in each rank's slice.
        mask_offset: bytes from the start of a slice to its mask: where the tensors end.
        alignment: bytes on which runs and slices start.

    Args:
        specs: the full tensors; at least one.
        world_size: number of ranks, at least 1.
        mask_numel: elements of the used-parameter mask, of the buffer's dtype, at the end of each
            rank's slice. Only legal if all dtypes are equal.
        alignment: bytes; a power of two, at least 16.

    Raises:
        ValueError: if any argument is outside what is said above.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        world_size: int,
        *,
        mask_numel: int = 0,
        alignment: int = _SLICE_ALIGNMENT,
    ) -> None:
        self.specs = tuple(specs)
        self.world_size = world_size
        self.mask_numel = mask_numel
        self.alignment = alignment
        self._validate()
        dtypes = tuple(dict.fromkeys(spec.dtype for spec in self.specs))
        uniform = dtypes[0] if len(dtypes) == 1 else torch.uint8
        offsets: dict[int, int] = {}
        end = 0
        self._payload = 0  # bytes of one slice that belong to a tensor's chunk
        for dtype in dtypes:
            end = _round_up(end, alignment)
            for index, spec in enumerate(self.specs):
                if spec.dtype is dtype:
                    offsets[index] = end
                    nbytes = spec.chunk_rows(world_size) * spec.row_numel * dtype.itemsize
                    end += nbytes
                    self._payload += nbytes
        self.mask_offset = end
        end = _round_up(end + mask_numel * uniform.itemsize, alignment)
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
        alignment = self.alignment
        if alignment < _SLICE_ALIGNMENT or alignment & (alignment - 1):
            raise ValueError(
                f"RankMajorLayout got alignment {alignment}; it must be a power of two and at "
                f"least {_SLICE_ALIGNMENT} bytes, the widest element."
            )
        dtypes = {str(spec.dtype) for spec in self.specs}
        if self.mask_numel and len(dtypes) > 1:
            raise ValueError(
                f"RankMajorLayout got mask_numel={self.mask_numel} with mixed dtypes "
                f"{sorted(dtypes)}; a mask needs one dtype, because it is reduced with the "
                "tensors. Use one layout per dtype."
            )

    @property
    def padding_bytes(self) -> int:
        """Bytes of one rank's slice that are alignment only: no tensor's chunk and no mask."""
        mask = self.mask_numel * self.buffer.dtype.itemsize
        return self.buffer.slice_nbytes - self._payload - mask

    def describe(self) -> str:
        """A table as text: one line per tensor, and the totals of a rank's slice in bytes."""
        rows = [("shape", "dtype", "dim", "offset", "chunk bytes", "ranks filled")]
        for spec, extent in zip(self.specs, self.extents, strict=True):
            chunk = spec.chunk_rows(self.world_size) * spec.row_numel * spec.dtype.itemsize
            filled = sum(piece.ranks for piece in extent.pieces)
            dtype = str(spec.dtype).removeprefix("torch.")
            rows.append(
                (str(spec.shape), dtype, str(spec.dim), str(extent.offset), str(chunk), str(filled))
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        dtype = str(self.buffer.dtype).removeprefix("torch.")
        total = (
            f"rank-major, {self.world_size} ranks, {self.buffer.slice_nbytes} bytes per rank "
            f"as {dtype}: {self._payload} of tensors, {self.mask_numel} of mask, "
            f"{self.padding_bytes} of padding"
        )
        return "\n".join([total, *lines])

    def __eq__(self, other: object) -> bool:
        """Whether ``other`` is rank-major with the same tensors, world, mask and alignment."""
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

    def _key(self) -> tuple[tuple[TensorSpec, ...], int, int, int]:
        return (self.specs, self.world_size, self.mask_numel, self.alignment)

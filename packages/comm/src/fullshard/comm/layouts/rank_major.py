"""The rank-major layout: one buffer, in which each rank's slice holds its shard of every tensor.

Owns: the arithmetic of dtype runs, alignment and padding. It is pure mathematics, as every layout.
Refuses: moving data (``gather`` and ``reduce`` do).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.comm.layouts.layout import BufferSpec, Slot, TensorSpec, pieces_of

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
        buffers: the one buffer.
        slots: one per tensor, in the order of ``specs``.
        marks: number of marks in each rank's slice.
        marks_offset: bytes from the start of a slice to its marks: where the tensors end.
        alignment: bytes on which runs and slices start.

    Args:
        specs: the full tensors; at least one.
        world_size: number of ranks, at least 1.
        marks: extra elements, of the buffer's dtype, at the end of each rank's slice. Only legal if
            all dtypes are equal.
        alignment: bytes; a power of two, at least 16.

    Raises:
        ValueError: if any argument is outside what is said above.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        world_size: int,
        *,
        marks: int = 0,
        alignment: int = _SLICE_ALIGNMENT,
    ) -> None:
        self.specs = tuple(specs)
        self.world_size = world_size
        self.marks = marks
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
        self.marks_offset = end
        end = _round_up(end + marks * uniform.itemsize, alignment)
        self.buffers = (BufferSpec(dtype=uniform, slice_numel=end // uniform.itemsize),)
        self.slots = tuple(
            Slot(buffer=0, offset=offsets[index], pieces=pieces_of(spec, world_size))
            for index, spec in enumerate(self.specs)
        )
        # A layout is the key of per-step caches; hashing hundreds of specs at every step would be
        # planning on the hot path.
        self._hash = hash((self.specs, world_size, marks, alignment))

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
        if not isinstance(self.marks, int) or self.marks < 0:
            raise ValueError(
                f"RankMajorLayout got marks {self.marks!r}; it must be an int >= 0, usually 0 or "
                "the number of tensors."
            )
        alignment = self.alignment
        if alignment < _SLICE_ALIGNMENT or alignment & (alignment - 1):
            raise ValueError(
                f"RankMajorLayout got alignment {alignment}; it must be a power of two and at "
                f"least {_SLICE_ALIGNMENT} bytes, the widest element."
            )
        dtypes = {str(spec.dtype) for spec in self.specs}
        if self.marks and len(dtypes) > 1:
            raise ValueError(
                f"RankMajorLayout got marks={self.marks} with mixed dtypes {sorted(dtypes)}; "
                "marks need one dtype, because they are reduced with the tensors. Use one layout "
                "per dtype."
            )

    @property
    def padding_bytes(self) -> int:
        """Bytes of one rank's slice that are alignment only: no tensor's chunk and no mark."""
        marks = self.marks * self.buffers[0].dtype.itemsize
        return self.buffers[0].slice_nbytes - self._payload - marks

    def describe(self) -> str:
        """A table as text: one line per tensor, and the totals of a rank's slice in bytes."""
        rows = [("shape", "dtype", "dim", "offset", "chunk bytes", "ranks filled")]
        for spec, slot in zip(self.specs, self.slots, strict=True):
            chunk = spec.chunk_rows(self.world_size) * spec.row_numel * spec.dtype.itemsize
            filled = sum(piece.ranks for piece in slot.pieces)
            dtype = str(spec.dtype).removeprefix("torch.")
            rows.append(
                (str(spec.shape), dtype, str(spec.dim), str(slot.offset), str(chunk), str(filled))
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        dtype = str(self.buffers[0].dtype).removeprefix("torch.")
        total = (
            f"rank-major, {self.world_size} ranks, {self.buffers[0].slice_nbytes} bytes per rank "
            f"as {dtype}: {self._payload} of tensors, {self.marks} marks, {self.padding_bytes} of "
            "padding"
        )
        return "\n".join([total, *lines])

    def __eq__(self, other: object) -> bool:
        """Whether ``other`` is rank-major with the same tensors, world, marks and alignment."""
        if self is other:
            return True
        if not isinstance(other, RankMajorLayout):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        """The hash computed at construction."""
        return self._hash

    def __repr__(self) -> str:
        """A short text: number of tensors, world size, marks and bytes per rank."""
        return (
            f"RankMajorLayout({len(self.specs)} tensors, world_size={self.world_size}, "
            f"marks={self.marks}, slice={self.buffers[0].slice_nbytes} bytes of "
            f"{self.buffers[0].dtype})"
        )

    def _key(self) -> tuple[tuple[TensorSpec, ...], int, int, int]:
        return (self.specs, self.world_size, self.marks, self.alignment)

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

    Args:
        specs: the full tensors; at least one.
        world_size: number of ranks, at least 1.
        marks: extra elements, of the buffer's dtype, at the end of each rank's slice. Only legal if
            all dtypes are equal.
        alignment: bytes; a power of two, at least 16.

    Raises:
        ValueError: if any argument is outside what is said above.
    """

    __slots__ = (
        "_alignment",
        "_buffer",
        "_hash",
        "_marks",
        "_marks_offset",
        "_payload",
        "_slots",
        "_specs",
        "_world_size",
    )

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        world_size: int,
        *,
        marks: int = 0,
        alignment: int = _SLICE_ALIGNMENT,
    ) -> None:
        self._specs = tuple(specs)
        self._world_size = world_size
        self._marks = marks
        self._alignment = alignment
        self._validate()
        dtypes = tuple(dict.fromkeys(spec.dtype for spec in self._specs))
        uniform = dtypes[0] if len(dtypes) == 1 else torch.uint8
        offsets: dict[int, int] = {}
        end = 0
        self._payload = 0  # bytes of one slice that belong to a tensor's chunk
        for dtype in dtypes:
            end = _round_up(end, alignment)
            for index, spec in enumerate(self._specs):
                if spec.dtype is dtype:
                    offsets[index] = end
                    nbytes = spec.chunk_rows(world_size) * spec.row_numel * dtype.itemsize
                    end += nbytes
                    self._payload += nbytes
        self._marks_offset = end
        end = _round_up(end + marks * uniform.itemsize, alignment)
        self._buffer = BufferSpec(dtype=uniform, slice_numel=end // uniform.itemsize)
        self._slots = tuple(
            Slot(buffer=0, offset=offsets[index], pieces=pieces_of(spec, world_size))
            for index, spec in enumerate(self._specs)
        )
        # A layout is the key of per-step caches; hashing hundreds of specs at every step would be
        # planning on the hot path.
        self._hash = hash((self._specs, world_size, marks, alignment))

    def _validate(self) -> None:
        if not self._specs:
            raise ValueError(
                "RankMajorLayout got no tensors; it needs at least one TensorSpec. Skip the "
                "collective when there is nothing to move."
            )
        if not isinstance(self._world_size, int) or self._world_size < 1:
            raise ValueError(
                f"RankMajorLayout got world_size {self._world_size!r}; it must be an int >= 1. "
                "Pass process_group.size()."
            )
        if not isinstance(self._marks, int) or self._marks < 0:
            raise ValueError(
                f"RankMajorLayout got marks {self._marks!r}; it must be an int >= 0, usually 0 or "
                "the number of tensors."
            )
        alignment = self._alignment
        if alignment < _SLICE_ALIGNMENT or alignment & (alignment - 1):
            raise ValueError(
                f"RankMajorLayout got alignment {alignment}; it must be a power of two and at "
                f"least {_SLICE_ALIGNMENT} bytes, the widest element."
            )
        dtypes = {str(spec.dtype) for spec in self._specs}
        if self._marks and len(dtypes) > 1:
            raise ValueError(
                f"RankMajorLayout got marks={self._marks} with mixed dtypes {sorted(dtypes)}; "
                "marks need one dtype, because they are reduced with the tensors. Use one layout "
                "per dtype."
            )

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors, in the order in which they were given."""
        return self._specs

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._world_size

    @property
    def buffers(self) -> tuple[BufferSpec, ...]:
        """The one buffer."""
        return (self._buffer,)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """One slot per tensor, in the order of ``specs``."""
        return self._slots

    @property
    def marks(self) -> int:
        """Number of marks in each rank's slice."""
        return self._marks

    @property
    def marks_offset(self) -> int:
        """Bytes from the start of a slice to its marks: where the tensors end."""
        return self._marks_offset

    @property
    def alignment(self) -> int:
        """Bytes on which runs and slices start."""
        return self._alignment

    @property
    def padding_bytes(self) -> int:
        """Bytes of one rank's slice that are alignment only: no tensor's chunk and no mark."""
        marks = self._marks * self._buffer.dtype.itemsize
        return self._buffer.slice_nbytes - self._payload - marks

    def describe(self) -> str:
        """A table as text: one line per tensor, and the totals of a rank's slice in bytes."""
        rows = [("shape", "dtype", "dim", "offset", "chunk bytes", "ranks filled")]
        for spec, slot in zip(self._specs, self._slots, strict=True):
            chunk = spec.chunk_rows(self._world_size) * spec.row_numel * spec.dtype.itemsize
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
        dtype = str(self._buffer.dtype).removeprefix("torch.")
        total = (
            f"rank-major, {self._world_size} ranks, {self._buffer.slice_nbytes} bytes per rank as "
            f"{dtype}: {self._payload} of tensors, {self._marks} marks, {self.padding_bytes} of "
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
            f"RankMajorLayout({len(self._specs)} tensors, world_size={self._world_size}, "
            f"marks={self._marks}, slice={self._buffer.slice_nbytes} bytes of {self._buffer.dtype})"
        )

    def _key(self) -> tuple[tuple[TensorSpec, ...], int, int, int]:
        return (self._specs, self._world_size, self._marks, self._alignment)

"""Layouts: the position of each tensor's shard in the buffer of a collective.

Owns: the arithmetic of sharding (who holds which rows), of padding and of alignment. This module is
pure mathematics: nothing here touches memory, a device or a process group. Refuses: moving data
(``views`` and ``gather`` do) and knowing what a tensor is for.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = [
    "BufferSpec",
    "Extent",
    "Layout",
    "PacksItself",
    "Piece",
    "TensorSpec",
    "pieces_of",
    "rank_major",
]

_ALIGNMENT = 16  # bytes, on which runs and slices start: the widest element


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor as a layout sees it: full (unsharded) shape, dtype on the wire, sharded dim.

    A 0-d tensor is allowed and laid out as ``(1,)``: rank 0 holds it. A negative ``dim`` is
    normalised.

    Attributes:
        shape: sizes of the full tensor.
        dtype: the dtype in which the tensor travels.
        dim: the dimension that is cut into shards.

    Raises:
        ValueError: if a size is negative or ``dim`` is not a dimension of ``shape``.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int = 0

    def __post_init__(self) -> None:
        """Normalise ``shape`` to a tuple of int and ``dim`` to a non-negative int."""
        shape = tuple(int(size) for size in self.shape)
        if any(size < 0 for size in shape):
            raise ValueError(
                f"TensorSpec got shape {shape}; sizes must be >= 0. Pass the full tensor's shape."
            )
        if not isinstance(self.dtype, torch.dtype):
            raise ValueError(
                f"TensorSpec got dtype {self.dtype!r}; it must be a torch.dtype such as "
                "torch.float32."
            )
        dims = max(len(shape), 1)
        if not -dims <= self.dim < dims:
            raise ValueError(
                f"TensorSpec got dim {self.dim} for shape {shape}; dim must lie in [{-dims}, "
                f"{dims - 1}]."
            )
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "dim", self.dim % dims)

    @property
    def form(self) -> str:
        """The form on the wire, as text: the dtype."""
        return str(self.dtype)

    @property
    def arrives_as(self) -> TensorSpec:
        """The tensor that is sent and arrives: this one, unless it ``PacksItself``."""
        return self

    def rounded(self, shard: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the ``shard`` of ``rank`` with the values that arrive, in their dtype."""
        return shard.to(self.dtype)

    @property
    def laid_shape(self) -> tuple[int, ...]:
        """The shape with a 0-d tensor seen as ``(1,)``."""
        return self.shape or (1,)

    @property
    def numel(self) -> int:
        """Elements of the full tensor (1 for a 0-d tensor)."""
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """Size of the sharded dimension (1 for a 0-d tensor)."""
        return self.laid_shape[self.dim]

    @property
    def row_numel(self) -> int:
        """Elements of one row: the product of all sizes but that of the sharded dimension."""
        shape = self.laid_shape
        return math.prod(shape[: self.dim] + shape[self.dim + 1 :])

    def chunk_rows(self, world_size: int) -> int:
        """Rows of a full chunk: ``ceil(rows / world_size)``."""
        return -(-self.rows // world_size)

    def first_row(self, rank: int, world_size: int) -> int:
        """The first row of ``rank``'s shard, at most ``rows``."""
        return min(rank * self.chunk_rows(world_size), self.rows)

    def shard_shape(self, rank: int, world_size: int) -> tuple[int, ...]:
        """The shape of ``rank``'s shard by the rule of ``torch.chunk``; it may have 0 rows.

        Raises:
            ValueError: if ``rank`` is not a rank of a world of ``world_size``.
        """
        if not 0 <= rank < world_size:
            raise ValueError(
                f"shard_shape got rank {rank} of world size {world_size}; pass a rank in [0, "
                "world_size) and a positive world size."
            )
        rows = self.first_row(rank + 1, world_size) - self.first_row(rank, world_size)
        return self.with_rows(rows)

    def with_rows(self, rows: int) -> tuple[int, ...]:
        """The laid shape with ``rows`` rows on the sharded dimension."""
        shape = self.laid_shape
        return (*shape[: self.dim], rows, *shape[self.dim + 1 :])


class PacksItself(TensorSpec, ABC):
    """A spec whose tensor travels in a form of its own: ``[holders, n]``, a row for each holder.

    Holders are the ranks that have a part of the tensor. Layouts, transports and checks handle the
    form like any other tensor. Shards of ``arrives_as`` are packed and copied out.
    """

    __slots__ = ()

    @abstractmethod
    def pack(self, shard: torch.Tensor, target: torch.Tensor, rank: int) -> None:
        """Fill ``target``, ``[1, n]``, for the ``shard`` of ``rank``."""

    @abstractmethod
    def unpack(self, pieces: Sequence[torch.Tensor], full: torch.Tensor, world_size: int) -> None:
        """Fill ``full``, of the shape of ``arrives_as`` or flat, in any dtype.

        Args:
            pieces: what arrived, each ``[holders, 1, n]``.
            full: the tensor to fill.
            world_size: ranks that share it.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSpec:
    """A flat buffer for one collective: its dtype and the elements that one rank contributes.

    Attributes:
        dtype: the one dtype of all its tensors, or ``torch.uint8`` when they are mixed.
        slice_numel: elements of ``dtype`` that one rank contributes, padding included.
    """

    dtype: torch.dtype
    slice_numel: int

    @property
    def slice_nbytes(self) -> int:
        """Bytes that one rank contributes."""
        return self.slice_numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive ranks that have equal shard shapes for a tensor.

    ``start`` is the first row of the shard of ``first_rank``, counted on the sharded dim of the
    full tensor.
    """

    first_rank: int
    ranks: int
    start: int
    shard_shape: tuple[int, ...]

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """The shape of all its shards, one behind the other: ``[ranks, *shard_shape]``."""
        return (self.ranks, *self.shard_shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The position of one tensor: its offset in BYTES in each rank's slice, and its pieces.

    There are at most two pieces: the full chunks and the ragged tail. A tensor without elements has
    none.
    """

    offset: int
    pieces: tuple[Piece, ...]


def pieces_of(spec: TensorSpec, world_size: int) -> tuple[Piece, ...]:
    """The full chunks of one tensor, and its ragged tail; none if it has no elements."""
    if spec.numel == 0:
        return ()
    chunk = spec.chunk_rows(world_size)
    full_ranks, tail_rows = divmod(spec.rows, chunk)
    pieces = ((0, full_ranks, chunk), (full_ranks, 1, tail_rows))  # first rank, ranks, rows of each
    return tuple(
        Piece(first_rank=first, ranks=ranks, start=first * chunk, shard_shape=spec.with_rows(rows))
        for first, ranks, rows in pieces
        if ranks and rows
    )


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Layout:
    """A rank-major buffer: each rank's slice holds its shards of all tensors, one after another.

    Tensors are ordered in runs of equal dtype (in order of first appearance, stable inside a run).
    Every run starts on a multiple of 16 bytes, so one launch can move any mix of dtypes. A tensor
    takes ``chunk_rows * row_numel`` elements of each slice, whether or not a rank's shard fills
    them. The slice is padded to 16 bytes. A layout compares and hashes by value, since what is
    derived from it is cached: do not change the attributes.

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
                "Layout got no tensors; it needs at least one TensorSpec. Skip the "
                "collective when there is nothing to move."
            )
        if not isinstance(self.world_size, int) or self.world_size < 1:
            raise ValueError(
                f"Layout got world_size {self.world_size!r}; it must be an int >= 1. "
                "Pass process_group.size()."
            )
        if not isinstance(self.mask_numel, int) or self.mask_numel < 0:
            raise ValueError(
                f"Layout got mask_numel {self.mask_numel!r}; it must be an int >= 0, "
                "usually 0 or the number of tensors."
            )
        dtypes = {str(spec.dtype) for spec in self.specs}
        if self.mask_numel and len(dtypes) > 1:
            raise ValueError(
                f"Layout got mask_numel={self.mask_numel} with mixed dtypes "
                f"{sorted(dtypes)}; a mask needs one dtype, because it is reduced with the "
                "tensors. Use one layout per dtype."
            )

    def __eq__(self, other: object) -> bool:
        """Whether ``other`` is a layout with equal tensors, world and mask."""
        if not isinstance(other, Layout):
            return NotImplemented
        return self is other or self._key() == other._key()

    def __hash__(self) -> int:
        """The hash computed at construction."""
        return self._hash

    def __repr__(self) -> str:
        """A short text: number of tensors, world size, mask and bytes per rank."""
        return (
            f"Layout({len(self.specs)} tensors, world_size={self.world_size}, "
            f"mask_numel={self.mask_numel}, slice={self.buffer.slice_nbytes} bytes of "
            f"{self.buffer.dtype})"
        )

    def _key(self) -> tuple[tuple[TensorSpec, ...], int, int]:
        return (self.specs, self.world_size, self.mask_numel)


@functools.lru_cache(maxsize=1024)
def rank_major(specs: tuple[TensorSpec, ...], world_size: int, mask_numel: int = 0) -> Layout:
    """Return one layout object for equal arguments, so that caches per layout are found."""
    return Layout(specs, world_size, mask_numel=mask_numel)

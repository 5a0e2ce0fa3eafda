"""The plan of a stream, who sends which part of which parameter in which bucket: pure arithmetic.

Owns the plan of a stream. Every rank computes the same plan from meshes and placements, which all
ranks know. Therefore no rank sends its plan. This module reads no values.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.boxes import Box, boxes_by_rank

__all__ = ["Piece", "Streamed", "buckets_of", "pieces_for", "streamed"]

_ALIGNED = 16  # bytes: a piece in a message may be viewed as any dtype


@dataclass(frozen=True, eq=False)
class Streamed:
    """A parameter in the stream.

    Attributes:
        name: its first clean name.
        shape: of the whole parameter.
        dtype: in which it travels.
        ranks: those that share it, of which this rank knows, itself among them; none if every rank
            has all of it. The ranks of another part of a mesh share another instance.
        holders: for each non-empty part, the ranks that hold it.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    ranks: frozenset[int]
    holders: Mapping[Box, Sequence[int]]

    @cached_property
    def nbytes(self) -> int:
        """Of the whole parameter, in bytes."""
        return self.shape.numel() * self.dtype.itemsize

    def source(self, box: Box, to: int) -> int:
        """Return the rank that gives rank ``to`` a part: itself, or one of its replicas."""
        ranks = self.holders[box]
        return to if to in ranks else ranks[zlib.crc32(self.name.encode()) % len(ranks)]


@dataclass(frozen=True)
class Piece:
    """A part of a parameter in a message.

    Attributes:
        param: whose part.
        box: which part.
        offset: of its first byte in the message.
    """

    param: Streamed
    box: Box
    offset: int

    @property
    def end(self) -> int:
        """The offset after its last byte."""
        return self.offset + self.box.numel * self.param.dtype.itemsize

    def in_message(self, message: torch.Tensor) -> torch.Tensor:
        """Return its place in ``message``, ``[bytes]`` of uint8: a view of its shape and dtype."""
        return message[self.offset : self.end].view(self.param.dtype).view(self.box.size)


def streamed(params: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> list[Streamed]:
    """Return what travels of ``params``, in their order; floating ones in ``dtype``."""
    known: dict[object, dict[Box, list[int]]] = {}  # layers of a model have equal ones
    found = []
    for name, param in params.items():
        ranks: frozenset[int] = frozenset()
        holders: dict[Box, list[int]] = {}
        if isinstance(param, DTensor):
            key = param.device_mesh, tuple(param.placements), param.shape
            holders = known[key] if key in known else known.setdefault(key, _holders(param))
            ranks = frozenset(param.device_mesh.mesh.flatten().tolist())
        cast = dtype is not None and param.is_floating_point()
        travels = dtype if cast and dtype is not None else param.dtype
        found.append(Streamed(name, param.shape, travels, ranks, holders))
    return found


def _holders(param: DTensor) -> dict[Box, list[int]]:
    found = dict[Box, list[int]]()
    for rank, box in boxes_by_rank(param).items():
        if box.numel > 0:
            found.setdefault(box, []).append(rank)
    return {box: sorted(ranks) for box, ranks in found.items()}


def buckets_of(params: Iterable[Streamed], bucket_bytes: int) -> list[list[Streamed]]:
    """Return ``params`` in their order, as many in each bucket as fit; a larger one is alone."""
    buckets: list[list[Streamed]] = []
    left = 0
    for param in params:
        if not buckets or param.nbytes > left:
            buckets.append([])
            left = bucket_bytes
        buckets[-1].append(param)
        left -= param.nbytes
    return buckets


def pieces_for(bucket: Iterable[Streamed], to: int) -> dict[int, list[Piece]]:
    """Return rank ``to``'s pieces of a bucket, by the rank that sends them."""
    messages: dict[int, list[Piece]] = {}
    for param in bucket:
        if to not in param.ranks:
            continue
        for box in param.holders:
            message = messages.setdefault(param.source(box, to), [])
            end = message[-1].end if message else 0
            message.append(Piece(param, box, -(-end // _ALIGNED) * _ALIGNED))
    return messages

"""Tensors that travel as codes: a layout sees the code, packing and copying out the tensor.

Owns the contract of a code, its place among the pieces of a tensor, and what arrives of a shard.
Refuses: any code; ``fullshard.wire`` has some.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch

from fullshard.comm.layouts import views
from fullshard.comm.layouts.layout import TensorSpec, pieces_of

__all__ = ["CodedSpec", "as_arrived", "by_holder", "coded_in"]


class CodedSpec(TensorSpec, ABC):
    """The spec of a code, ``[holders, words]``: a row for each rank that holds a part of a tensor.

    Layouts, transports and checks therefore handle a code like any other tensor. Shards of the
    ``decoded`` tensor are packed and copied out.
    """

    __slots__ = ()

    @abstractmethod
    def encode(self, parts: torch.Tensor, codes: torch.Tensor, first_rank: int) -> None:
        """Fill ``codes``, ``[n, words]``, for the shards of ``n`` ranks from ``first_rank`` on.

        Args:
            parts: their shards, which have the same shape: ``[n, *shard_shape]``.
            codes: in the dtype of the spec; the last dim is contiguous.
            first_rank: whose shard is the first.
        """

    @abstractmethod
    def decode(self, codes: torch.Tensor, parts: torch.Tensor, first_rank: int) -> None:
        """Fill ``parts``, in any dtype, with the values that ``encode`` made ``codes`` of."""


def coded_in(specs: Sequence[TensorSpec]) -> dict[int, CodedSpec]:
    """The codes among ``specs``, by their places."""
    return {place: spec for place, spec in enumerate(specs) if isinstance(spec, CodedSpec)}


def by_holder(
    full: torch.Tensor, spec: CodedSpec, world_size: int, codes: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Yield the arguments of ``encode`` for all shards of a full tensor.

    Args:
        full: of ``spec.decoded.shape``, or flat.
        spec: its code.
        world_size: ranks that share it.
        codes: ``[holders, 1, words]``.
    """
    pieces = pieces_of(spec.decoded, world_size)
    for piece, part in zip(pieces, views.full_views(full, spec.decoded, pieces), strict=True):
        yield part, codes.squeeze(1).narrow(0, piece.first_rank, piece.ranks), piece.first_rank


@torch.no_grad()
def as_arrived(shard: torch.Tensor, spec: TensorSpec, rank: int) -> torch.Tensor:
    """Return the ``shard`` of ``rank`` as all ranks receive it, rounded to ``spec``."""
    if not isinstance(spec, CodedSpec):
        return shard.to(spec.dtype)
    codes = torch.empty(1, spec.row_numel, dtype=spec.dtype, device=shard.device)
    arrived = torch.empty_like(shard, dtype=spec.decoded.dtype)
    spec.encode(shard.unsqueeze(0), codes, rank)
    spec.decode(codes, arrived.unsqueeze(0), rank)
    return arrived

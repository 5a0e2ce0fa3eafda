"""This rank's shards as they were when a stream began, and all memory that a stream takes.

Owns the copy, which part of it goes into which message, and when it is let go.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch

from fullshard.checkpoint.streaming.plan import Piece, Streamed
from fullshard.sharding.spi import local_of

__all__ = ["PinnedShards", "memory"]


def memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return memory on the CPU of arbitrary content; all that a stream takes comes from here."""
    return torch.empty(shape, dtype=dtype, device="cpu")


class PinnedShards:
    """A copy of this rank's shards on the CPU, in the dtypes in which they travel."""

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        plan: Sequence[Streamed],
        to: Sequence[int],
        rank: int,
    ) -> None:
        """Copy what any rank in ``to`` gets from this one.

        Args:
            params: the parameters by name, each as an optimizer holds it.
            plan: the same, as they travel.
            to: the global ranks that get them.
            rank: this one's global number.
        """
        self._rank = rank
        self._uses: dict[str, int] = {}
        self._shards: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()
        for each in plan:
            if uses := sum(self._gives(each, target) for target in to):
                self._uses[each.name] = uses
                self._shards[each.name] = _copy(params[each.name], each.dtype)

    def _gives(self, param: Streamed, to: int) -> bool:
        """Return whether rank ``to``, perhaps this rank, gets a part of ``param`` from here."""
        if to not in param.ranks:
            return to == self._rank
        mine = (box for box, ranks in param.holders.items() if self._rank in ranks)
        return any(param.source(box, to) == self._rank for box in mine)

    def message(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Return a message of ``pieces``, all of them this rank's: ``[bytes]`` of uint8."""
        packed = memory((pieces[-1].end,), torch.uint8)
        for piece in pieces:
            piece.in_message(packed).copy_(self._shards[piece.param.name])
        return packed

    def fill(self, full: torch.Tensor, param: Streamed) -> None:
        """Copy this rank's part of ``param`` into the whole tensor ``full``."""
        if self._rank not in param.ranks and param.nbytes:  # this rank has all of it
            full.copy_(self._shards[param.name])
        for box, ranks in param.holders.items():
            if self._rank in ranks:
                box.of(full).copy_(self._shards[param.name])

    def release(self, bucket: Sequence[Streamed], to: int) -> None:
        """Let go of the shards of a bucket that only rank ``to`` had yet to get."""
        with self._lock:
            for param in bucket:
                if self._gives(param, to):
                    self._uses[param.name] -= 1
                    if self._uses[param.name] == 0:
                        del self._shards[param.name]


def _copy(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    local = local_of(param).detach()
    return memory(local.shape, dtype).copy_(local)

"""A group's unsharded parameters where the one rank's shards already are all there is.

Owns the tensors over the shards' own memory, for a world of one. Nothing is gathered, copied or
freed; what an optimizer changes is changed at once. An autograd graph that holds an alias of them
keeps that memory itself, so parameters may always move on from here. Where they must be cast, they
are, straight into private memory. Refuses: deciding who may use it; see ``PlainContents``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fullshard.comm import EventKind, GatherLane, OwnShards, ReduceLane, TensorSpec, emit
from fullshard.sharding.gather.store import view_of

__all__ = ["AliasStore", "AliasedGather", "CopiedGather", "is_alone", "lie_as_used"]

_ToUse = Sequence[Callable[[torch.Tensor], torch.Tensor]]


class AliasStore:
    """The shards of one group as its unsharded parameters.

    Attributes:
        fills: per parameter the shard, full shape, with a version counter of its own.
        seen: per parameter what the modules see.
    """

    def __init__(self, shards: OwnShards, to_use: _ToUse) -> None:
        """Makes the tensors; see ``OwnStore``."""
        self._shards = shards
        self._addresses = [shard.data_ptr() for shard in shards.tensors]
        pairs = list(zip(shards.tensors, shards.layout.specs, strict=True))
        with torch.inference_mode(False), torch.no_grad():
            self.fills = [_view_of(shard, spec) for shard, spec in pairs]
            self.seen = [
                used(_view_of(shard, spec))
                for (shard, spec), used in zip(pairs, to_use, strict=True)
            ]

    def is_of(self, shards: OwnShards) -> bool:
        """Whether these are the shards, and lie where they did."""
        return shards is self._shards and self._addresses == [
            shard.data_ptr() for shard in shards.tensors
        ]


@dataclass(frozen=True)
class AliasedGather:
    """A gather for which nothing moves."""

    store: AliasStore

    def discard(self) -> None:
        """Does nothing: there is nothing to give back."""


@dataclass(frozen=True)
class CopiedGather:
    """A gather for which nothing moves until it lands: then shards are cast.

    Attributes:
        fills: per parameter the shard, full shape, in its own dtype.
        lane: ranks and name.
    """

    fills: list[torch.Tensor]
    lane: GatherLane

    @classmethod
    def of(cls, shards: OwnShards, lane: GatherLane) -> CopiedGather:
        """The gather of these shards."""
        pairs = zip(shards.tensors, shards.layout.specs, strict=True)
        return cls([shard.view(spec.shape) for shard, spec in pairs], lane)

    def note(self, nbytes: int) -> None:
        """Tells that so many bytes were written, by the one rank that there is."""
        emit(EventKind.COPY_OUT, self.lane.name, rank=0, nbytes=nbytes, stream="current")

    def discard(self) -> None:
        """Does nothing: there is nothing to give back."""


def is_alone(lane: GatherLane | ReduceLane) -> bool:
    """Tells whether the lane's collective says that nothing is to be moved or encoded."""
    asks = getattr(lane.comm, "aliases_input", None)
    return asks is not None and bool(asks(lane.process_group))


def lie_as_used(shards: OwnShards, lane: GatherLane) -> bool:
    """Tells whether all shards of a world of one can be used where they lie."""
    return all(
        type(shard) in (torch.Tensor, nn.Parameter)
        and shard.dtype is spec.dtype
        and shard.numel() == spec.numel
        and shard.is_contiguous()
        and shard.device == lane.device
        for shard, spec in zip(shards.tensors, shards.layout.specs, strict=True)
    )


def _view_of(shard: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    offset = int(shard.storage_offset()) * spec.dtype.itemsize
    return view_of(shard.untyped_storage(), spec, offset, shard.device)

"""A group's unsharded parameters where the one rank's shards already are all there is.

Owns the tensors over the shards' own memory, for a world of one. Nothing is gathered, copied or
freed; what an optimizer changes is changed at once. An autograd graph that holds an alias of them
keeps that memory itself, so parameters may always move on from here. Refuses: deciding who may use
it; see ``PlainContents``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fullshard.comm import GatherLane, OwnShards, TensorSpec
from fullshard.sharding.store import view_of

__all__ = ["AliasStore", "AliasedGather", "may_alias"]

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


def may_alias(shards: OwnShards, lane: GatherLane) -> bool:
    """Tells whether the shards can be used as they lie: in a world of one, all of them.

    The lane's collective says that nothing is to be moved or encoded, and nothing is to be cast.
    """
    asks = getattr(lane.comm, "aliases_input", None)
    if asks is None or not asks(lane.process_group):
        return False
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

"""Uses a group's shards as its full parameters, where the one rank's shards are all there is.

Owns the tensors over the shards' own memory, for a world of one. Nothing is gathered, copied or
freed; what an optimizer changes is changed at once. Where shards must be cast, they are, straight
into private memory.
"""

from __future__ import annotations

import torch
from torch import nn

from fullshard.comm import EventKind, GatherConfig
from fullshard.comm.collectives.gather import OwnShards
from fullshard.comm.runtime.observer import emit
from fullshard.sharding.base.compat import storage_of
from fullshard.sharding.gather.inputs import GatherInputs
from fullshard.sharding.gather.strategy import Home, ToUse, UnshardedMemory, UnshardStrategy

__all__ = ["AliasedUnshard"]


class AliasedShards(Home):
    """The shards of one group as the memory of its unsharded parameters."""

    kept_by_graphs = True

    def __init__(self, shards: OwnShards, to_use: ToUse) -> None:
        """Makes the tensors: full shape, with version counters of their own."""
        self._shards = shards
        self._storages = list(map(storage_of, shards.tensors))
        places = [
            (shard, int(shard.storage_offset()) * shard.dtype.itemsize) for shard in shards.tensors
        ]
        super().__init__(shards.layout.specs, places, to_use)

    def is_of(self, shards: OwnShards) -> bool:
        """Whether these are the shards, and lie where they did."""
        return shards is self._shards and self._storages == list(map(storage_of, shards.tensors))


class AliasedUnshard(UnshardStrategy):
    """Parameters are the shards, or a cast copy of them."""

    def __init__(self, memory: UnshardedMemory, inputs: GatherInputs) -> None:
        """Takes private memory, and what would be sent."""
        super().__init__(memory, inputs)
        self._alias: AliasedShards | None = None  # the shards that served last
        self._launched: tuple[OwnShards, GatherConfig] | None = None

    def launch(self, config: GatherConfig, *, async_op: bool) -> None:
        """Moves nothing."""
        shards = self.sends(config)
        if self._alias is None or not self._alias.is_of(shards):
            usable = self.memory.movable and _lie_as_used(shards, config)
            self._alias = AliasedShards(shards, self.memory.to_use) if usable else None
        self._launched = shards, config

    def land(self, *, private: bool, movable: bool) -> None:
        """Copies where a user may write, or to cast."""
        assert self._launched is not None, "it was launched"
        (shards, config), self._launched = self._launched, None
        memory, alias = self.memory, self._alias
        memory.move(memory if private or alias is None else alias, movable=movable)
        if alias is None:
            pairs = zip(shards.tensors, shards.layout.specs, strict=True)
            memory.fill_from([shard.view(spec.shape) for shard, spec in pairs])
            emit(EventKind.COPY_OUT, config.name, rank=0, nbytes=memory.nbytes, stream="current")
        elif memory.home is not alias:
            memory.fill_from(alias.fills)

    def discard(self) -> None:
        """There is nothing to wait for."""
        self._launched = None


def _lie_as_used(shards: OwnShards, config: GatherConfig) -> bool:
    """Tells whether all shards of a world of one can be used where they lie."""
    return all(
        type(shard) in (torch.Tensor, nn.Parameter)
        and shard.dtype is spec.dtype
        and shard.is_contiguous()
        and shard.device == config.device
        for shard, spec in zip(shards.tensors, shards.layout.specs, strict=True)
    )

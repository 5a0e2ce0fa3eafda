"""Uses a group's shards as its full parameters, where the one rank's shards are all there is.

Owns the tensors over the shards' own memory, for a world of one. Nothing is gathered, copied or
freed; what an optimizer changes is changed at once. Where shards must be cast, they are, straight
into private memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fullshard.comm import EventKind, GatherConfig, Layout, TensorSpec
from fullshard.comm.collectives.gather import OwnShards
from fullshard.comm.runtime.observer import emit
from fullshard.sharding.gather.inputs import GatherInputs
from fullshard.sharding.gather.memory import ToUse, UnshardedMemory, view_of

__all__ = ["AliasedUnshard"]


class AliasedShards:
    """The shards of one group as the memory of its unsharded parameters; a ``Home``.

    Attributes:
        fills: per parameter the shard, full shape, with a version counter of its own.
        seen: see ``Home``.
        kept_by_graphs: True.
    """

    kept_by_graphs = True

    def __init__(self, shards: OwnShards, to_use: ToUse) -> None:
        """Makes the tensors."""
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

    def allocate(self) -> None:
        """Does nothing."""

    def free(self) -> None:
        """Does nothing."""


class AliasedUnshard:
    """Parameters are the shards, or a cast copy of them."""

    coalesces = None

    def __init__(
        self, memory: UnshardedMemory, inputs: GatherInputs, layout: Layout, to_use: ToUse
    ) -> None:
        """Takes private memory, and what would be sent, of all parameters."""
        self.layout = layout
        self._memory = memory
        self._inputs = inputs
        self._to_use = to_use
        self._alias: AliasedShards | None = None  # the shards that served last
        self._launched: tuple[OwnShards, GatherConfig] | None = None

    @property
    def fills(self) -> Sequence[torch.Tensor]:
        """One tensor per parameter, where it lies."""
        return self._memory.home.fills

    def launch(
        self, staged: Sequence[torch.Tensor], config: GatherConfig, *, async_op: bool
    ) -> None:
        """Moves nothing."""
        shards = self._inputs.of(staged, config)
        if self._alias is None or not self._alias.is_of(shards):
            usable = self._memory.movable and _lie_as_used(shards, config)
            self._alias = AliasedShards(shards, self._to_use) if usable else None
        self._launched = shards, config

    def land(self, *, private: bool, movable: bool) -> None:
        """Copies where a user may write, or to cast."""
        assert self._launched is not None, "it was launched"
        (shards, config), self._launched = self._launched, None
        memory, alias = self._memory, self._alias
        if alias is None:
            memory.move(memory, movable=movable)
            memory.fill_from(
                [
                    shard.view(spec.shape)
                    for shard, spec in zip(shards.tensors, self.layout.specs, strict=True)
                ]
            )
            emit(EventKind.COPY_OUT, config.name, rank=0, nbytes=memory.nbytes, stream="current")
            return
        memory.move(memory if private else alias, movable=movable)
        if memory.home is not alias:
            memory.fill_from(alias.fills)

    def discard(self) -> None:
        """There is nothing to wait for."""
        self._launched = None

    def free(self) -> None:
        """Frees private memory."""
        self._memory.free()


def _lie_as_used(shards: OwnShards, config: GatherConfig) -> bool:
    """Tells whether all shards of a world of one can be used where they lie."""
    return all(
        type(shard) in (torch.Tensor, nn.Parameter)
        and shard.dtype is spec.dtype
        and shard.numel() == spec.numel
        and shard.is_contiguous()
        and shard.device == config.device
        for shard, spec in zip(shards.tensors, shards.layout.specs, strict=True)
    )


def _view_of(shard: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    offset = int(shard.storage_offset()) * spec.dtype.itemsize
    return view_of(shard.untyped_storage(), spec, offset, shard.device)

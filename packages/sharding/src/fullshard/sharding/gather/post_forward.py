"""Keeps shards over a post-forward mesh between forward and backward, and gathers from them.

Owns those shards: ``reshard_after_forward=8``, say. Backward then gathers over few ranks, one
host's perhaps, for the memory of a larger shard. The modules hold the ordinary sharded parameters
meanwhile. Wraps the strategy that gathers from the ordinary shards, which fills the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fullshard.comm import GatherConfig, Layout
from fullshard.sharding.gather.buffered import PackedUnshard
from fullshard.sharding.mesh.mesh_info import FSDPMeshInfo
from fullshard.sharding.params.plan import rank_major

__all__ = ["PostForwardUnshard"]


class PostForwardUnshard:
    """One group's shards over a post-forward mesh.

    Attributes:
        shards: of each gathered tensor this rank's part; empty unless kept.
    """

    coalesces = None

    def __init__(self, ordinary: PackedUnshard, mesh_info: FSDPMeshInfo) -> None:
        """Starts with none kept."""
        self.shards: list[torch.Tensor] = []
        self._ordinary = ordinary
        self._mesh_info = mesh_info

    @property
    def layout(self) -> Layout:
        """Where everything lies in a gather over the post-forward mesh."""
        return rank_major(self._ordinary.layout.specs, self._mesh_info.shard_world_size, 0)

    @property
    def fills(self) -> Sequence[torch.Tensor]:
        """The tensors that a gather writes, whichever shards it reads."""
        return self._ordinary.fills

    @torch.no_grad()
    def keep(self) -> None:
        """Cuts what was gathered last, which has its memory now."""
        self.shards = [
            self._mesh_info.shard_of(full, spec.dim)
            for full, spec in zip(self.fills, self._ordinary.layout.specs, strict=True)
        ]

    def drop(self) -> None:
        """Frees the shards."""
        self.shards = []

    def launch(
        self, staged: Sequence[torch.Tensor], config: GatherConfig, *, async_op: bool
    ) -> None:
        """Issues a gather of what is kept; ``staged`` are those."""
        few = replace(config, process_group=self._mesh_info.shard_process_group)
        self._ordinary.launch_packed(staged, self.layout, few, async_op=async_op)

    def land(self, *, private: bool, movable: bool) -> None:
        """Fills what a gather from the ordinary shards would."""
        self._ordinary.land(private=private, movable=movable)

    def discard(self) -> None:
        """Waits for a gather that nobody wants."""
        self._ordinary.discard()

    def free(self) -> None:
        """Gives the memory back."""
        self._ordinary.free()

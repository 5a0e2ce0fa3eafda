"""Keeps shards over a post-forward mesh between forward and backward, and gathers from them.

Owns those shards: ``reshard_after_forward=8``, say. Backward then gathers over few ranks, one
host's perhaps, for the memory of a larger shard. The modules hold the ordinary sharded parameters
meanwhile. Such a gather lands as one from the ordinary shards does, in the same memory.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fullshard.comm import GatherConfig, foreach_all_gather
from fullshard.sharding.gather.strategy import BufferedUnshard
from fullshard.sharding.mesh.mesh_info import FSDPMeshInfo
from fullshard.sharding.params.plan import rank_major

__all__ = ["PostForwardShards"]


class PostForwardShards:
    """One group's shards over a post-forward mesh.

    Attributes:
        strategy: how the group is gathered otherwise.
    """

    def __init__(self, strategy: BufferedUnshard, mesh_info: FSDPMeshInfo) -> None:
        """Starts with none kept."""
        self.strategy = strategy
        self._mesh_info = mesh_info
        self._shards: list[torch.Tensor] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Cuts what was gathered last, which has its memory now."""
        specs = self.strategy.layout.specs
        self._shards = [
            self._mesh_info.shard_of(full, spec.dim)
            for full, spec in zip(self.strategy.fills, specs, strict=True)
        ]

    def drop(self) -> None:
        """Frees the shards."""
        self._shards = []

    def launch(self, config: GatherConfig, *, async_op: bool) -> None:
        """Issues a gather of what is kept, which the strategy lands."""
        few = replace(config, process_group=self._mesh_info.shard_process_group)
        layout = rank_major(self.strategy.layout.specs, self._mesh_info.shard_world_size, 0)
        self.strategy.in_flight = foreach_all_gather(self._shards, layout, few, async_op=async_op)

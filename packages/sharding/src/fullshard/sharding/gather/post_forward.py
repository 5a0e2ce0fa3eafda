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
        mesh_info: that mesh.
    """

    def __init__(self, mesh_info: FSDPMeshInfo) -> None:
        """Starts with none kept."""
        self.mesh_info = mesh_info
        self._shards: list[torch.Tensor] = []

    @torch.no_grad()
    def keep(self, strategy: BufferedUnshard) -> None:
        """Cuts what ``strategy`` gathered last, which has its memory now."""
        specs = strategy.layout.specs
        self._shards = [
            self.mesh_info.shard_of(full, spec.dim)
            for full, spec in zip(strategy.fills, specs, strict=True)
        ]

    def drop(self) -> None:
        """Frees the shards."""
        self._shards = []

    def launch(self, strategy: BufferedUnshard, config: GatherConfig, *, async_op: bool) -> None:
        """Issues a gather of what is kept, which ``strategy`` lands."""
        few = replace(config, process_group=self.mesh_info.shard_process_group)
        layout = rank_major(strategy.layout.specs, self.mesh_info.shard_world_size, 0)
        strategy.in_flight = foreach_all_gather(self._shards, layout, few, async_op=async_op)

"""Keeps shards over a post-forward mesh between forward and backward, and gathers from them.

Owns those shards: ``reshard_after_forward=8``, say. Backward then gathers over few ranks, one
host's perhaps, for the memory of a larger shard. The modules hold the ordinary sharded parameters
during this time. Such a gather writes to the memory that an ordinary gather uses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fullshard.comm import AllGatherInFlight, GatherConfig, Layout, foreach_all_gather
from fullshard.comm.spi import StreamEvent, rank_major
from fullshard.sharding.base.forward_pass import ParameterGeneration
from fullshard.sharding.gather.strategy import (
    BufferedUnshard,
    Holders,
    SendsShards,
    UnshardStrategy,
)
from fullshard.sharding.mesh.mesh_info import FSDPMeshInfo

__all__ = ["PostForwardUnshard"]


@dataclass(frozen=True, eq=False)
class PostForwardShards:
    """Shards over a post-forward mesh, kept for a backward.

    Attributes:
        shards: this rank's, one per tensor of the layout.
        layout: of a gather over the mesh.
        mesh_info: the mesh.
        cut: the end of the copies that are kept.
    """

    shards: list[torch.Tensor]
    layout: Layout
    mesh_info: FSDPMeshInfo
    cut: StreamEvent

    def gather(self, config: GatherConfig, *, async_op: bool = False) -> AllGatherInFlight:
        """Return the gather in flight, over the few ranks of the mesh."""
        few = replace(config, process_group=self.mesh_info.shard_process_group)
        config.streams.copy_in.wait_event(self.cut)
        return foreach_all_gather(self.shards, self.layout, few, async_op=async_op)


class PostForwardUnshard(UnshardStrategy):
    """Gather from post-forward shards while some are kept, and delegate to ``inner`` otherwise."""

    def __init__(
        self, inner: BufferedUnshard, mesh_info: FSDPMeshInfo, generation: ParameterGeneration
    ) -> None:
        """Start without kept shards.

        Args:
            inner: the other.
            mesh_info: the post-forward mesh.
            generation: of the parameters, whose outstanding forwards keep shards.
        """
        super().__init__(inner.memory, inner.inputs)
        self._inner = inner
        self._mesh_info = mesh_info
        self._generation = generation
        self._gathered_of = -1
        self._kept: PostForwardShards | None = None

    @property
    def keeps_shards(self) -> bool:
        """Whether current shards are kept that a backward may need."""
        if not self._generation.outstanding or self._gathered_of != self._generation.number:
            self._kept = None
        return self._kept is not None

    def sends(self, config: GatherConfig) -> SendsShards:
        """Return the kept shards if there are any, and the ordinary ones otherwise."""
        if self.keeps_shards and self._kept is not None:
            return self._kept
        self._gathered_of = self._generation.number
        return self._inner.sends(config)

    def finish(self, in_flight: AllGatherInFlight, holders: Holders) -> None:
        """Wait and copy out, as ``inner`` does."""
        self._inner.finish(in_flight, holders)

    def discard(self, in_flight: AllGatherInFlight) -> None:
        """Wait for a gather whose result is not needed."""
        in_flight.discard()

    @torch.no_grad()
    def keep_shards(self, config: GatherConfig, *, wanted: bool) -> None:
        """Keep shards of what was gathered, if ``wanted`` and a backward may need them."""
        self._kept = None
        if wanted and self._generation.outstanding:
            mesh_info = self._mesh_info
            specs = [spec.decoded for spec in self.inputs.layout.specs]  # codes are for all ranks
            tensors = zip(self._inner.write_views, specs, strict=True)
            shards = [mesh_info.shard_of(full, spec.dim) for full, spec in tensors]
            layout = rank_major(tuple(specs), mesh_info.shard_world_size, 0)
            cut = config.streams.record()
            self._kept = PostForwardShards(shards, layout, mesh_info, cut)

"""Keeps shards over a post-forward mesh between forward and backward, and gathers from them.

Owns those shards: ``reshard_after_forward=8``, say. Backward then gathers over few ranks, one
host's perhaps, for the memory of a larger shard. The modules hold the ordinary sharded parameters
during this time. Such a gather writes to the memory that an ordinary gather uses.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fullshard.comm import CommStreams, GatherConfig, foreach_all_gather
from fullshard.comm.spi import StreamEvent, rank_major
from fullshard.sharding.base.forward_pass import ParameterGeneration
from fullshard.sharding.gather.strategy import BufferedUnshard, UnshardStrategy
from fullshard.sharding.mesh.mesh_info import FSDPMeshInfo

__all__ = ["PostForwardUnshard"]


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
        self._shards: list[torch.Tensor] = []
        self._streams: CommStreams | None = None
        self._cut: StreamEvent | None = None  # the end of the copies that are kept

    @property
    def keeps_shards(self) -> bool:
        """Whether current shards are kept that a backward may need."""
        if not self._generation.outstanding or self._gathered_of != self._generation.number:
            self._shards = []
        return bool(self._shards)

    def launch(self, config: GatherConfig, *, async_op: bool) -> None:
        """Launch a gather, from the kept shards if there are any."""
        self._streams = config.streams
        if not self.keeps_shards:
            self._gathered_of = self._generation.number
            self._inner.launch(config, async_op=async_op)
            return
        mesh_info = self._mesh_info
        few = replace(config, process_group=mesh_info.shard_process_group)
        specs = tuple(spec.decoded for spec in self.inputs.layout.specs)  # codes are for all ranks
        layout = rank_major(specs, mesh_info.shard_world_size, 0)
        config.streams.copy_in.wait_event(self._cut)
        gather = foreach_all_gather(self._shards, layout, few, async_op=async_op)
        self._inner.in_flight = gather

    def finish(self, *, user_may_write: bool, no_graph_alias: bool) -> None:
        """Wait and copy out, as ``inner`` does."""
        self._inner.finish(user_may_write=user_may_write, no_graph_alias=no_graph_alias)

    def discard(self) -> None:
        """Wait for a gather whose result is not needed."""
        self._inner.discard()

    @torch.no_grad()
    def keep_shards(self, wanted: bool) -> None:
        """Keep shards of what was gathered, if ``wanted`` and a backward may need them."""
        self._shards = []
        if wanted and self._generation.outstanding:
            tensors = zip(self._inner.write_views, self.inputs.layout.specs, strict=True)
            shard_of = self._mesh_info.shard_of
            self._shards = [shard_of(full, spec.decoded.dim) for full, spec in tensors]
            assert self._streams is not None, "it was gathered"
            self._cut = self._streams.record()

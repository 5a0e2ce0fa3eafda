"""Shards on their way into a gather over the first level of a two-level mesh.

Owns the compute shards of a group. A compute shard is this rank's part of a parameter over the
first axis of the mesh. Each rank stores a part of a compute shard only, over the second axis.
Compute shards are gathered from these parts once in a step, and stay allocated; see
[Note: kept copies]. So a step with several micro-batches communicates once over the second axis,
which may be a slow network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fullshard.comm import GatherConfig, Layout, default_all_gather
from fullshard.comm.spi import FullTensors, OwnShards, as_arrived, rank_major
from fullshard.sharding.base.forward_pass import ParameterGeneration
from fullshard.sharding.gather.strategy import GatherInputs
from fullshard.sharding.mesh.mesh_info import TwoLevelMeshInfo
from fullshard.sharding.params.param import FSDPParam

__all__ = ["TwoLevelInputs"]


class TwoLevelInputs(GatherInputs):
    """The compute shards of a group."""

    may_coalesce = False

    def __init__(
        self,
        params: Sequence[FSDPParam],
        layout: Layout,
        mesh_info: TwoLevelMeshInfo,
        generation: ParameterGeneration,
    ) -> None:
        """Make no compute shard yet.

        Args:
            params: the parameters, in the order of ``layout``.
            layout: of a gather over the first axis.
            mesh_info: the mesh.
            generation: of the parameters.
        """
        super().__init__(params, layout)
        self.as_stored = True  # a gather sends the compute shards themselves
        self._group = mesh_info.second.shard_process_group
        self._generation = generation
        self._current = -1  # the generation of the compute shards
        self._comm = default_all_gather(self._group)
        cuts = [param.sharding.second_cut for param in self.params]
        both = zip(self.params, cuts, strict=True)
        specs = tuple([cut.spec_in(param.gather_spec.dtype) for param, cut in both])
        self._stored = GatherInputs(params, rank_major(specs, self._group.size(), 0), cuts)
        self._full: FullTensors | None = None
        self._compute: OwnShards | None = None

    def sends(self, config: GatherConfig) -> OwnShards:
        """Return the compute shards, gathered again if forgotten or if parameters changed."""
        if self._current != self._generation.number or self._compute is None:
            self._gather_compute_shards(config)
            self._current = self._generation.number
        assert self._compute is not None, "they were gathered"
        return self._compute

    def forget_copies(self) -> None:
        """Make the next gather start from the stored shards."""
        self._current = -1

    def arrived(self, param: FSDPParam) -> torch.Tensor:
        """Return the stored part of the compute shard as a gather over the first axis rounds it."""
        assert self._compute is not None, "they were gathered"
        compute = self._compute.tensors[self.params.index(param)]
        whole = as_arrived(compute, param.sent, param.mesh_info.shard_rank)
        return param.sharding.second_cut.shard_of(param.sharding.to_store(whole))

    @torch.no_grad()
    def _gather_compute_shards(self, config: GatherConfig) -> None:
        """Gather over the second axis. The stream that packs shards waits, not the current one."""
        streams, layout = config.streams, self._stored.layout
        name = f"{config.name} (second level)"
        over_second = replace(config, comm=self._comm, process_group=self._group, name=name)
        in_flight = self._stored.sends(over_second).gather(over_second)
        with streams.use(streams.copy_in):
            if self._full is None:
                with torch.inference_mode(False):
                    made = [
                        torch.empty(spec.shape, dtype=spec.dtype, device=config.device)
                        for spec in layout.specs
                    ]
                self._full = FullTensors(made, layout, over_second)
                travel = [
                    param.sharding.to_travel(param.sharding.second_cut.to_use(full))
                    for param, full in zip(self.params, made, strict=True)
                ]
                self._compute = OwnShards(travel, self.layout, config)
            self._full.fill(in_flight)
        if self.layout.world_size == 1:  # the current stream reads them without a gather
            streams.current().wait_event(streams.record(streams.copy_in))

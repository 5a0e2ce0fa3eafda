"""Compute shards: larger shards, over fewer ranks, from which full parameters are gathered.

Owns two kinds. With placements over a part of a mesh's axes, compute shards are gathered from
stored parts: ``TwoLevelInputs``. With an int for ``reshard_after_forward``, they are cut from full
parameters: ``PostForwardInputs``. The modules hold the ordinary sharded parameters during that
time.

[Note: post-forward mesh] ``reshard_after_forward=n`` keeps compute shards over *n* neighbouring
ranks from a forward to the gather of its backward. A gather from stored shards runs over all ranks:
the stored shards are cut as torch cuts them, so neighbours do not store the parts of one compute
shard. If they did, ranks would store other rows, gradients would be reduced in another order, and
neither tensor parallel parameters nor hooks around a gather could be cut twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fullshard.comm import AllGatherInFlight, GatherConfig, Layout, default_all_gather
from fullshard.comm.spi import FullTensors, OwnShards, rank_major
from fullshard.sharding.base.forward_pass import ParameterGeneration
from fullshard.sharding.gather.strategy import GatherInputs
from fullshard.sharding.mesh.mesh_info import FSDPMeshInfo, TwoLevelMeshInfo
from fullshard.sharding.params.param import FSDPParam

__all__ = ["PostForwardInputs", "TwoLevelInputs"]


class ComputeShards(GatherInputs):
    """The compute shards of a group.

    Attributes:
        stored: the stored shards that they are made of.
    """

    def __init__(
        self, stored: GatherInputs, layout: Layout, generation: ParameterGeneration
    ) -> None:
        """Make no compute shard yet.

        Args:
            stored: the stored shards.
            layout: of the first gather.
            generation: of the parameters.
        """
        super().__init__(stored.params, layout)
        self.stored = stored
        self._generation = generation
        self._copied_of = -1  # the generation of the compute shards
        self._compute: OwnShards | None = None

    @property
    def has_copies(self) -> bool:
        """Whether the next gather starts from compute shards that exist."""
        return self._compute is not None and self._copied_of == self._generation.number

    def forget_copies(self) -> None:
        """Make the next gather start from the stored shards."""
        self._copied_of = -1


# -- gathered from stored parts -------------------------------------------------------------------


class TwoLevelInputs(ComputeShards):
    """Compute shards over the first axis of a two-level mesh.

    Each rank stores a part of a compute shard only, over the second axis. Compute shards are
    gathered from these parts once in a step, and stay allocated; see [Note: kept copies]. Therefore
    a step with several micro-batches communicates once over the second axis, which may be a slow
    network.
    """

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
        self._group = mesh_info.second.shard_process_group
        cuts = [param.sharding.second_cut for param in params]
        both = zip(params, cuts, strict=True)
        specs = tuple([cut.spec_in(param.gather_spec.dtype) for param, cut in both])
        stored = GatherInputs(params, rank_major(specs, self._group.size(), 0), cuts)
        super().__init__(stored, layout, generation)
        self.as_stored = True  # a gather sends the compute shards themselves
        self._comm = default_all_gather(self._group)
        self._full: FullTensors | None = None

    def sends(self, config: GatherConfig) -> OwnShards:
        """Return the compute shards, gathered again if forgotten or if parameters changed."""
        if not self.has_copies:
            self._gather_compute_shards(config)
            self._copied_of = self._generation.number
        assert self._compute is not None, "they were gathered"
        return self._compute

    def arrived(self, param: FSDPParam) -> torch.Tensor:
        """Return the stored part of the compute shard as a gather over the first axis rounds it."""
        assert self._compute is not None, "they were gathered"
        compute = self._compute.tensors[self.params.index(param)]
        whole = param.sent.rounded(compute, param.mesh_info.shard_rank)
        return param.sharding.second_cut.shard_of(param.sharding.to_store(whole))

    @torch.no_grad()
    def _gather_compute_shards(self, config: GatherConfig) -> None:
        """Gather over the second axis. The stream that packs shards waits, not the current one."""
        streams, layout = config.streams, self.stored.layout
        name = f"{config.name} (second level)"
        over_second = replace(config, comm=self._comm, process_group=self._group, name=name)
        in_flight = self.stored.sends(over_second).gather(over_second)
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


# -- cut from full parameters ---------------------------------------------------------------------


class CutShards(OwnShards):
    """Compute shards that were cut from full parameters, for one gather over few ranks."""

    def __init__(
        self, full: Sequence[torch.Tensor], layout: Layout, few: FSDPMeshInfo, config: GatherConfig
    ) -> None:
        """Cut ``full``, which a gather of ``layout`` gave, over the ranks of ``few``."""
        specs = tuple([spec.arrives_as for spec in layout.specs])
        shards = [few.shard_of(tensor, spec.dim) for tensor, spec in zip(full, specs, strict=True)]
        self._group = few.shard_process_group
        over_few = replace(config, process_group=self._group)
        super().__init__(shards, rank_major(specs, few.shard_world_size, 0), over_few)
        self._cut = config.streams.record()

    def gather(self, config: GatherConfig, *, async_op: bool = False) -> AllGatherInFlight:
        """Return the gather in flight, over the few ranks."""
        config.streams.copy_in.wait_event(self._cut)
        over_few = replace(config, process_group=self._group)
        return super().gather(over_few, async_op=async_op)


class PostForwardInputs(ComputeShards):
    """Stored shards, or compute shards from a forward to its backward's gather.

    See [Note: post-forward mesh].
    """

    def __init__(
        self, stored: GatherInputs, few: FSDPMeshInfo, generation: ParameterGeneration
    ) -> None:
        """Make no compute shard yet.

        Args:
            stored: the stored shards.
            few: the post-forward mesh.
            generation: of the parameters, whose outstanding forwards keep compute shards.
        """
        super().__init__(stored, stored.layout, generation)
        self.cuts_full = True
        self._few = few

    @property
    def has_copies(self) -> bool:
        """Whether the next gather starts from compute shards; a backward must be outstanding."""
        return bool(self._generation.outstanding) and super().has_copies

    def sends(self, config: GatherConfig) -> OwnShards:
        """Return the compute shards, once, and the stored shards without any."""
        compute = self._compute if self.has_copies else None
        self._compute = None  # the gather keeps them
        if compute is None:
            compute = self.stored.sends(config)
            self.layout = self.stored.layout  # hooks decide it
        return compute

    @torch.no_grad()
    def keep_copies(self, full: Sequence[torch.Tensor], config: GatherConfig) -> None:
        """Cut compute shards, if a backward may need them."""
        if self._generation.outstanding:
            self._compute = CutShards(full, self.layout, self._few, config)
            self._copied_of = self._generation.number

"""How a group is gathered: memory, what is sent, and the strategy, chosen at the first gather.

Owns the choice, and when it is made again: if the collective, the parameters, the post-forward mesh
or what is kept are others. ``Gathering`` uses what was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from fullshard.comm import AllGather, GatherConfig, Layout
from fullshard.comm.spi import rank_major
from fullshard.sharding.base.forward_pass import ParameterGeneration
from fullshard.sharding.base.policies import Policies
from fullshard.sharding.gather.compute_shards import PostForwardInputs, TwoLevelInputs
from fullshard.sharding.gather.hooked import HookedInputs, HookedUnshard
from fullshard.sharding.gather.in_place import (
    AliasedUnshard,
    SharedBufferUnshard,
    open_shared_memory,
)
from fullshard.sharding.gather.strategy import (
    BufferedUnshard,
    GatherInputs,
    UnshardedMemory,
    UnshardStrategy,
)
from fullshard.sharding.mesh.mesh_info import FSDPMeshInfo, TwoLevelMeshInfo
from fullshard.sharding.params.param import FSDPParam
from fullshard.sharding.params.param_sharding import has_hooks

__all__ = ["GatherSetup"]


class GatherSetup:
    """How a group is gathered.

    Attributes:
        strategy: what the last gather used; None before the first.
        chosen_for: the collective for which it was chosen; None: the next gather chooses.
        prepared: memory and inputs; None: the next use makes them.
        keeps_storage: the memory of the full parameters stays allocated while they are sharded.
    """

    def __init__(
        self,
        params: Sequence[FSDPParam],
        policies: Policies,
        device: torch.device,
        generation: ParameterGeneration,
    ) -> None:
        """Choose nothing yet; see ``Gathering``."""
        self._params = tuple(params)
        self._policies = policies
        self._device = device
        self._generation = generation
        self._post_forward: FSDPMeshInfo | None = None
        self.keeps_storage = False
        self.prepared: BufferedUnshard | None = None
        self.strategy: UnshardStrategy | None = None
        self.chosen_for: AllGather | None = None

    def forget(self) -> None:
        """Prepare and choose again: parameters changed."""
        self.prepared = self.strategy = None

    def choose_again(self) -> None:
        """Let the next gather choose."""
        self.chosen_for = None

    @property
    def post_forward_size(self) -> int:
        """Ranks over which compute shards are kept from forward to backward; 0: none are kept."""
        return 0 if self._post_forward is None else self._post_forward.shard_world_size

    def set_post_forward_mesh(self, mesh_info: FSDPMeshInfo | None) -> None:
        """Keep compute shards over ``mesh_info`` from forward to backward; None: keep none.

        A mesh is given before the first gather.
        """
        if mesh_info is not self._post_forward:
            self._post_forward = mesh_info
            self.choose_again()
            if self.prepared is not None:
                self.prepared.inputs = cast(PostForwardInputs, self.prepared.inputs).stored

    @property
    def layout(self) -> Layout:
        """The layout of the group's gathers."""
        if self.prepared is not None:
            return self.prepared.inputs.layout
        specs = tuple(param.sent for param in self._params)
        return rank_major(specs, self._params[0].mesh_info.shard_world_size, 0)

    def prepare(self) -> BufferedUnshard:
        """Return memory and inputs, made at the first call since a look at what modules hold."""
        if self.prepared is None:
            plain = [param for param in self._params if not has_hooks(param.name, param.shard)]
            to_use = [param.sharding.to_use for param in plain]
            specs = [param.gather_spec for param in plain]
            memory = UnshardedMemory(specs, self._device, to_use)
            memory.stays = self.keeps_storage
            for param, unsharded in zip(plain, memory.params, strict=True):
                param.attach_unsharded(unsharded)
            mesh_info = self._params[0].mesh_info
            if isinstance(mesh_info, TwoLevelMeshInfo):
                levels = TwoLevelInputs(self._params, self.layout, mesh_info, self._generation)
                self.prepared = BufferedUnshard(memory, levels)
            elif len(plain) == len(self._params):
                self.prepared = BufferedUnshard(memory, GatherInputs(self._params, self.layout))
            else:
                inputs = HookedInputs(self._params, self.layout, self._policies.precision)
                self.prepared = HookedUnshard(memory, inputs)
            if self._post_forward is not None:
                self.prepared.inputs = PostForwardInputs(
                    self.prepared.inputs, self._post_forward, self._generation
                )
        return self.prepared

    def choose(self, config: GatherConfig) -> UnshardStrategy:
        """Choose how to gather from now on; a collective call, where memory is shared."""
        self.chosen_for = config.comm
        self.strategy = self._chosen(self.prepared or self.prepare(), config)
        return self.strategy

    def _chosen(self, buffered: BufferedUnshard, config: GatherConfig) -> UnshardStrategy:
        memory, inputs = buffered.memory, buffered.inputs
        if type(buffered) is HookedUnshard or self.keeps_storage or inputs.cuts_full:
            return buffered
        if config.collective.offers.aliases_input(config.process_group) and inputs.as_stored:
            return AliasedUnshard(memory, inputs)
        shared = None
        if memory.can_move and inputs.layout.specs == memory.specs:  # no copy-out is needed
            shared = open_shared_memory(inputs.layout, config, memory.to_use)
        return buffered if shared is None else SharedBufferUnshard(memory, inputs, shared)

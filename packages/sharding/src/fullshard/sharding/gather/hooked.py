"""Gathers a group of which some parameters have hooks around their gather.

Owns the order of things: hooks say what travels, it is gathered through buffers beside the shards
of the others, and hooks make parameters of what came. The calls are ``HookedParam``'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.comm import GatherConfig, Layout, TensorSpec
from fullshard.comm.collectives.gather import OwnShards
from fullshard.sharding.base.generation import ParameterGeneration
from fullshard.sharding.base.policies import Policies
from fullshard.sharding.gather.hooked_param import HookedParam
from fullshard.sharding.gather.inputs import GatherInputs
from fullshard.sharding.gather.strategy import BufferedUnshard, UnshardedMemory
from fullshard.sharding.params.param import FSDPParam
from fullshard.sharding.params.plan import rank_major
from fullshard.sharding.params.sources import has_hooks

__all__ = ["HookedInputs", "HookedUnshard"]


class HookedInputs(GatherInputs):
    """What hooks give of some parameters, and the shards of the others.

    Attributes:
        hooked: per parameter what calls its hooks, if it has any.
    """

    def __init__(
        self,
        params: Sequence[FSDPParam],
        layout: Layout,
        policies: Policies,
        device: torch.device,
        generation: ParameterGeneration,
    ) -> None:
        """See ``GatherInputs``.

        Raises:
            ValueError: if a hook cannot be called.
        """
        super().__init__(params, layout, policies, device, generation)
        self.hooked = [
            HookedParam(param, device, policies.precision)
            if has_hooks(param.name, param.shard)
            else None
            for param in params
        ]

    @torch.no_grad()
    def of(self, config: GatherConfig) -> OwnShards:
        """Returns what travels; hooks are called on the stream that will read what they give."""
        shards: list[torch.Tensor] = []
        specs: list[TensorSpec] = []
        staged = self.staged(config.streams)
        with config.streams.use(config.streams.copy_in):
            for param, hooked, shard in zip(self.params, self.hooked, staged, strict=True):
                if hooked is None:
                    shards.append(param.sharding.to_travel(shard))
                    specs.append(param.gather_spec)
                else:
                    shards.extend(hooked.shards(shard))
                    specs.extend(hooked.specs)
        return OwnShards(shards, rank_major(tuple(specs), self.layout.world_size, 0), config)


class HookedUnshard(BufferedUnshard):
    """Some parameters are made by their hooks of what was gathered, the others lie in memory."""

    coalesces = False  # hooks decide what travels

    def __init__(self, memory: UnshardedMemory, inputs: HookedInputs) -> None:
        """Takes the memory of the parameters without hooks."""
        super().__init__(memory, inputs.layout)
        self._all = inputs.hooked
        self._hooked = [hooked for hooked in inputs.hooked if hooked is not None]
        memory.beside = [*self._hooked]

    @property
    def fills(self) -> Sequence[torch.Tensor]:
        """One tensor per parameter without hooks, those of the others between them."""
        plain = iter(self.memory.fills)
        return [
            fill
            for hooked in self._all
            for fill in ([next(plain)] if hooked is None else hooked.fills)
        ]

    @torch.no_grad()
    def land(self, *, private: bool, movable: bool) -> None:
        """Unpacks, and calls the hooks on what was gathered for them."""
        for hooked in self._hooked:
            hooked.allocate()
        super().land(private=private, movable=movable)
        for hooked in self._hooked:
            hooked.complete()

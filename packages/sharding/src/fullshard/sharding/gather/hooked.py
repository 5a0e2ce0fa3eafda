"""Gathers a group of which some parameters have hooks around their gather.

Owns the order of things: hooks say what travels, it is gathered through buffers beside the shards
of the others, and hooks make parameters of what came. The calls are ``HookedParam``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fullshard.comm import (
    GatherConfig,
    Layout,
    TensorSpec,
    foreach_all_gather_copy_out,
)
from fullshard.sharding.gather.buffered import PackedUnshard
from fullshard.sharding.gather.hooked_param import HookContext, HookedParam
from fullshard.sharding.gather.memory import UnshardedMemory
from fullshard.sharding.params.param import FSDPParam
from fullshard.sharding.params.plan import rank_major
from fullshard.sharding.params.sources import has_hooks

__all__ = ["HookedUnshard"]


class HookedUnshard(PackedUnshard):
    """Some parameters gather what their hook gives, the others their shards."""

    coalesces = None  # hooks decide what travels

    def __init__(
        self,
        params: Sequence[FSDPParam],
        memory: UnshardedMemory,
        layout: Layout,
        context: HookContext,
    ) -> None:
        """Takes the memory of those of ``params`` that have no hooks, in their order.

        ``layout``: of a gather of the shards, as long as no hook has said what travels.

        Raises:
            ValueError: if a hook cannot be called.
        """
        super().__init__(layout)
        self._memory = memory
        self._params = params
        self._hooked = {
            index: HookedParam(param, context)
            for index, param in enumerate(params)
            if has_hooks(param.name, param.shard)
        }

    @property
    def fills(self) -> Sequence[torch.Tensor]:
        """One tensor per parameter without hooks, those of the others between them."""
        return self._each(lambda index: self._memory.fills[index], lambda each: each.fills)

    def _each(
        self, plain: Callable[[int], Any], hooked: Callable[[HookedParam], Sequence[Any]]
    ) -> list[Any]:
        """Returns what each parameter contributes: one thing, or several where it has hooks.

        Args:
            plain: told which of the parameters without hooks it is.
            hooked: told which.
        """
        found: list[Any] = []
        count = 0
        for index in range(len(self._params)):
            if index in self._hooked:
                found.extend(hooked(self._hooked[index]))
            else:
                found.append(plain(count))
                count += 1
        return found

    @torch.no_grad()
    def launch(
        self, staged: Sequence[torch.Tensor], config: GatherConfig, *, async_op: bool
    ) -> None:
        """Gathers what the hooks give, and the other shards.

        Hooks are called on the stream that will read what they give.
        """
        shards: list[torch.Tensor] = []
        specs: list[TensorSpec] = []
        with config.streams.use(config.streams.copy_in):
            for index, (param, shard) in enumerate(zip(self._params, staged, strict=True)):
                hooked = self._hooked.get(index)
                if hooked is None:
                    shards.append(param.sharding.to_travel(shard))
                    specs.append(param.gather_spec)
                else:
                    shards.extend(hooked.shards(shard))
                    specs.extend(hooked.specs)
        self.layout = rank_major(tuple(specs), self.layout.world_size, 0)
        self.launch_packed(shards, self.layout, config, async_op=async_op)

    @torch.no_grad()
    def land(self, *, private: bool, movable: bool) -> None:
        """Unpacks, and calls the hooks on what was gathered for them."""
        in_flight = self.taken()
        self._memory.allocate()
        for hooked in self._hooked.values():
            hooked.allocate()
        foreach_all_gather_copy_out(in_flight, self.fills)  # hooks may have made them anew
        for hooked in self._hooked.values():
            hooked.complete()

    def free(self) -> None:
        """Gives the memory back."""
        self._memory.free()
        for hooked in self._hooked.values():
            hooked.free()

"""A group's shards on their way from where they live to where the model computes.

Owns the copies there that an offload policy asks to keep, which serve until the parameters change,
and asks for shards as ``CastShards`` has them: cast once, if the policy of dtypes keeps casts.
It refuses to know where anything lives: the policy moves, one shard at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch

from fullshard.comm import CommStreams
from fullshard.sharding.base.compat import local_shard_getter
from fullshard.sharding.base.generation import ParameterGeneration
from fullshard.sharding.params.casting import CastShards
from fullshard.sharding.params.param import FSDPParam
from fullshard.sharding.protocols import NoOffload, Offload, ParameterDTypes

__all__ = ["DeviceShards"]

_stored = local_shard_getter("sharded")


class DeviceShards:
    """The shards of one group on the device."""

    def __init__(
        self,
        dtypes: ParameterDTypes,
        offload: Offload,
        device: torch.device,
        generation: ParameterGeneration,
    ) -> None:
        """Holds nothing yet."""
        self._dtypes = dtypes
        self._offload = offload
        self._device = device
        self._generation = generation
        self._casts = CastShards(offload, generation)
        identity = getattr(offload.stage_in, "__func__", None) is NoOffload.stage_in
        self._stay = identity and not dtypes.keeps_casts()  # they are gathered as they are stored
        self._kept: tuple[torch.Tensor, ...] = ()
        self._kept_of = -1

    def of(self, params: Sequence[FSDPParam], streams: CommStreams) -> Sequence[torch.Tensor]:
        """Returns the shard of each of ``params`` on the device, as the copy-in stream sees it.

        Copies are made on that stream, which alone reads them.
        """
        if self._stay:
            return list(map(_stored, params))
        generation = self._generation.number
        if self._kept and self._kept_of == generation:
            return self._kept
        self._kept = ()  # before new copies are made, so that they can have the memory
        casts, offload = self._dtypes.keeps_casts(), self._offload
        with streams.use(streams.copy_in):
            shards = self._casts.of(params) if casts else list(map(_stored, params))
            staged = tuple([offload.stage_in(shard, self._device) for shard in shards])
            if casts and not all(map(is_, staged, shards)):
                self._casts.read_until(streams.record(streams.copy_in))
        if offload.keeps_staged():
            self._kept, self._kept_of = staged, generation
        return staged

    def serving(self, params: Sequence[FSDPParam]) -> Sequence[bool]:
        """Tells for each of ``params`` whether ``of`` would give what was made of an earlier shard.

        Copied or cast, and kept since.
        """
        if self._kept and self._kept_of == self._generation.number:
            return [True] * len(params)
        return self._casts.serving(params)

    def forget(self) -> None:
        """Gives back what is kept: the parameters were replaced, or are gathered otherwise."""
        self._kept = ()
        self._casts.forget()

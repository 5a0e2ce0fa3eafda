"""A group's shards on their way into a gather: cast, brought to the device, checked, kept.

Owns the copies on that way: shards in a smaller dtype if the policy of dtypes keeps casts, and
those on the device if the offload policy keeps them. Both serve until the parameters change. A cast
lies where its shard lives and is filled again in place; cast before the copy to the device, a shard
travels in its smaller dtype. So one that a cast would make larger is left to the gather, which
casts after that copy. What the hooks around a gather are given is always the shard itself. It
refuses to know where anything lives: the policy moves, one shard at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch

from fullshard.comm import GatherConfig, Layout
from fullshard.comm.collectives.gather import OwnShards
from fullshard.comm.runtime.compat import foreach_copy
from fullshard.comm.runtime.streams import StreamEvent
from fullshard.sharding.base.compat import local_shard_getter
from fullshard.sharding.base.forward_pass import ParameterGeneration
from fullshard.sharding.base.policies import Policies
from fullshard.sharding.params.param import FSDPParam
from fullshard.sharding.params.param_sharding import has_hooks
from fullshard.sharding.protocols import NoOffload

__all__ = ["GatherInputs"]

_stored = local_shard_getter("sharded")


class GatherInputs:
    """What the gathers of one group send.

    Attributes:
        params: whose.
        layout: of a gather of all.
        as_stored: whether what is sent is the shards as they live, not copies.
    """

    def __init__(
        self,
        params: Sequence[FSDPParam],
        layout: Layout,
        policies: Policies,
        generation: ParameterGeneration,
    ) -> None:
        """Takes the parameters in the order of ``layout``; holds no copy yet."""
        self.params = tuple(params)
        self.layout = layout
        self._precision = policies.precision
        self._offload = offload = policies.offload
        self._generation = generation
        casting = self._precision.keeps_casts()
        self._cast = [index for index, param in enumerate(params) if casting and _shrinks(param)]
        self._casts: dict[int, torch.Tensor] = {}
        self._casts_of = -1
        self._copies: Sequence[torch.Tensor] = ()
        self._copies_of = -1
        self._read: StreamEvent | None = None  # the end of the copies of the casts
        stays = getattr(offload.stage_in, "__func__", None) is NoOffload.stage_in
        self.as_stored = stays and not self._cast
        self._shards: list[torch.Tensor] = []
        self._sent: OwnShards | None = None  # made of those

    def sends(self, config: GatherConfig) -> OwnShards:
        """Returns what a gather sends: the same again while it is the same shards as they live."""
        shards = list(map(_stored, self.params))
        sent = self._sent
        if sent is None or not all(map(is_, shards, self._shards)):
            sent = self.of(config)
            if self.as_stored:
                self._shards, self._sent = shards, sent
        return sent

    def of(self, config: GatherConfig) -> OwnShards:
        """Returns what travels of the shards as the copy-in stream sees them."""
        pairs = zip(self.params, self.staged(config), strict=True)
        return OwnShards([p.sharding.to_travel(each) for p, each in pairs], self.layout, config)

    def staged(self, config: GatherConfig) -> Sequence[torch.Tensor]:
        """Returns each parameter's shard on the device, as the copy-in stream sees it.

        Copies are made on that stream, which alone reads them.
        """
        if self.as_stored:
            return list(map(_stored, self.params))
        generation = self._generation.number
        if self._copies and self._copies_of == generation:
            return self._copies
        self._copies = ()  # before new copies are made, so that they can have the memory
        streams = config.streams
        with streams.use(streams.copy_in):
            shards = self._in_gathered_dtype(generation)
            staged = [self._offload.stage_in(shard, config.device) for shard in shards]
            if self._cast and not all(map(is_, staged, shards)):
                self._read = streams.record(streams.copy_in)
        if self._offload.keeps_staged():
            self._copies, self._copies_of = staged, generation
        return staged

    def reused(self) -> list[bool]:
        """Tells for each parameter whether the next gather would send a copy made earlier."""
        now = self._generation.number
        staged, cast = bool(self._copies) and self._copies_of == now, self._casts_of == now
        return [staged or (cast and index in self._casts) for index in range(len(self.params))]

    @torch.no_grad()
    def _in_gathered_dtype(self, generation: int) -> list[torch.Tensor]:
        """Returns the shards where they live, cast where casts are kept: once per generation."""
        shards = list(map(_stored, self.params))
        if self._casts_of != generation:
            targets = [self._cast_memory(index, shards[index]) for index in self._cast]
            self._casts = dict(zip(self._cast, targets, strict=True))
            filled = [index for index in self._cast if shards[index].numel()]  # keeps foreach fast
            if filled and self._read is not None:  # a copy to the device may still be reading
                self._read.synchronize()
            foreach_copy([self._casts[i] for i in filled], [shards[i] for i in filled])
            self._casts_of = generation  # now that they hold what they say
        for index, cast in self._casts.items():
            shards[index] = cast
        return shards

    def _cast_memory(self, index: int, shard: torch.Tensor) -> torch.Tensor:
        """Returns where to cast ``shard``: where it was cast before, if that fits."""
        before = self._casts.get(index)
        if before is not None and (before.shape, before.device) == (shard.shape, shard.device):
            return before
        dtype = self.params[index].gather_spec.dtype
        with torch.inference_mode(False):  # an inference tensor is not written in training
            return self._offload.store(torch.empty(shard.shape, dtype=dtype, device=shard.device))


def _shrinks(param: FSDPParam) -> bool:
    """Tells whether a cast shard is kept for ``param``: it is another, and not larger."""
    shard, gathered = param.shard, param.gather_spec.dtype
    return (
        gathered is not shard.dtype
        and gathered.itemsize <= shard.dtype.itemsize
        and not has_hooks(param.name, shard)
    )

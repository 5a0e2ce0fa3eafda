"""A group's shards in the dtype in which they are gathered, cast once per parameter generation.

Owns the memory of the cast shards, filled again in place when the parameters have changed, and
knows which of them still serve. It refuses to move anything: a cast shard lies where its shard
lives, and is copied in from there. Cast before that copy, a shard travels in its smaller dtype; so
one that a cast would make larger is left to the gather, which casts after the copy. What the hooks
around a gather are given is always the shard itself.

[Note: frozen parameters] No optimizer's step changes a parameter that neither requires nor has a
gradient, so its cast shard outlives a generation that began with a step. Whether that held is seen
right after each step: a parameter may have been thawed and frozen again between two gathers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fullshard.comm.runtime.compat import foreach_copy
from fullshard.comm.runtime.streams import StreamEvent
from fullshard.sharding.base.compat import local_shard
from fullshard.sharding.base.generation import ParameterGeneration
from fullshard.sharding.params.param import FSDPParam
from fullshard.sharding.params.sources import has_hooks
from fullshard.sharding.protocols import Offload

__all__ = ["CastShards"]


@dataclass(eq=False)
class _Cast:
    """One parameter's cast shard.

    Attributes:
        tensor: the shard, cast.
        generation: the generation that it was made from.
        lasting: the parameter was frozen then, and at each step since.
    """

    tensor: torch.Tensor
    generation: int
    lasting: bool

    def is_fresh(self, now: ParameterGeneration) -> bool:
        """Tells whether it serves now."""
        if self.generation == now.number:
            return True
        return self.lasting and self.generation >= now.announced

    def fits(self, param: FSDPParam, shard: torch.Tensor) -> bool:
        """Tells whether ``shard`` can be cast into its memory."""
        tensor = self.tensor
        return (
            tensor.dtype is param.gather_spec.dtype
            and tensor.shape == shard.shape
            and tensor.device == shard.device
        )


class CastShards:
    """The shards of one group as its gathers want them."""

    def __init__(self, offload: Offload, generation: ParameterGeneration) -> None:
        """Holds nothing yet."""
        self._offload = offload
        self._generation = generation
        self._params: Sequence[FSDPParam] = ()
        self._casts: dict[int, _Cast] = {}
        self._cast_of = -1
        self._read: StreamEvent | None = None

    def of(self, params: Sequence[FSDPParam]) -> Sequence[torch.Tensor]:
        """Returns the shard of each of ``params`` where it lives, cast.

        Casts are made on the current stream, which must always be the same.
        """
        generation = self._generation.number
        if self._cast_of != generation:
            self._renew(params, generation)
            self._cast_of = generation
        casts = self._casts
        return [
            casts[index].tensor if index in casts else local_shard(param.sharded)
            for index, param in enumerate(params)
        ]

    def serving(self, params: Sequence[FSDPParam]) -> Sequence[bool]:
        """Tells for each of ``params`` whether ``of`` would give a cast shard made earlier."""
        casts = [self._casts.get(index) for index in range(len(params))]
        return [
            cast is not None and cast.is_fresh(self._generation) and cast.fits(param, param.shard)
            for cast, param in zip(casts, params, strict=True)
        ]

    def read_until(self, event: StreamEvent) -> None:
        """Takes the end of the copies that were begun of what ``of`` gave last."""
        self._read = event

    def forget(self) -> None:
        """Gives the memory back: the parameters were replaced, or are gathered otherwise."""
        self._casts.clear()
        self._cast_of = -1
        self._read = None

    def stepped(self) -> None:
        """Looks which parameters are frozen; see [Note: frozen parameters]."""
        for index, cast in self._casts.items():
            cast.lasting = cast.lasting and _is_frozen(self._params[index])

    @torch.no_grad()
    def _renew(self, params: Sequence[FSDPParam], generation: int) -> None:
        """Casts those shards anew that have changed."""
        serving = self.serving(params)
        casts: dict[int, _Cast] = {}
        stale: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        for index, param in enumerate(params):
            shard = local_shard(param.sharded)
            if not _shrinks(param, shard):
                continue
            if serving[index]:
                casts[index] = self._casts[index]
                continue
            casts[index] = self._place(index, param, shard, generation)
            if shard.numel():  # empty tensors would keep foreach off its fast path
                stale.append(shard)
                targets.append(casts[index].tensor)
        if self._read is not None and targets:  # a copy to the device may still be reading
            self._read.synchronize()
        foreach_copy(targets, stale)
        self._casts, self._params = casts, params  # now that they hold what they say
        if any(cast.lasting for cast in casts.values()):
            self._generation.tell_of_steps(self)

    def _place(self, index: int, param: FSDPParam, shard: torch.Tensor, generation: int) -> _Cast:
        """Returns where to cast ``shard``: where it was cast before, if that fits."""
        before = self._casts.get(index)
        if before is not None and before.fits(param, shard):
            tensor = before.tensor
        else:
            with torch.inference_mode(False):  # an inference tensor is not written in training
                new = torch.empty(shard.shape, dtype=param.gather_spec.dtype, device=shard.device)
                tensor = self._offload.store(new)
        return _Cast(tensor, generation, _is_frozen(param))


def _shrinks(param: FSDPParam, shard: torch.Tensor) -> bool:
    """Tells whether a cast shard is kept for ``param``: it is another, and not larger."""
    gathered = param.gather_spec.dtype
    return (
        gathered is not shard.dtype
        and gathered.itemsize <= shard.dtype.itemsize
        and not has_hooks(param.name, shard)
    )


def _is_frozen(param: FSDPParam) -> bool:
    return not param.sharded.requires_grad and param.sharded.grad is None

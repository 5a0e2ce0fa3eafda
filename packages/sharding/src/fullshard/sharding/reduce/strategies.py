"""The ways to reduce that are not one reduce-scatter, one class each, chosen once.

[Note: reduce strategies] ``PlainReduce`` is the contract: given how to reduce and the gradients,
launch, and return what is in flight. ``AliasReduce`` uses the gradients of a world of one directly.
``HybridReduce`` also reduces over replicas (HSDP). The engine never asks which one it has, where
torch's ``fully_shard`` passes flags and optional groups down one long function.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fullshard.comm import ReducedShards, ReduceInFlight, all_reduce_shards
from fullshard.sharding.base.tensors import is_plain
from fullshard.sharding.params.param import FSDPParam
from fullshard.sharding.reduce.reduction import Gradients, InFlight, PlainReduce, ReductionSetup

__all__ = ["AliasReduce", "HybridReduce"]

# -- a world of one -------------------------------------------------------------------------------


class AliasReduce(PlainReduce):
    """The gradient of autograd is used as the sharded gradient: one rank, no scaling.

    Gradients that are missing or need a cast are reduced by the collective.
    """

    def launch(self, setup: ReductionSetup, gradients: Gradients) -> InFlight:
        """Return the gradients if all can be used directly; otherwise reduce-scatter."""
        dtype, shards = setup.layout.buffer.dtype, []
        for gradient, spec in zip(gradients, setup.layout.specs, strict=True):
            if (
                gradient is None
                or not is_plain(gradient)
                or gradient.dtype is not dtype
                or not gradient.is_contiguous()
                or gradient.device != setup.config.device
            ):
                return setup.plan.launch(gradients)
            shards.append(gradient.view(spec.laid_shape))
        result = ReducedShards(shards=shards, mask=None, output=shards[0])
        return ReduceInFlight(setup.plan, None, setup.config.streams.record(), result=result)


# -- replicas -------------------------------------------------------------------------------------

_Key = tuple[tuple[FSDPParam, ...], torch.dtype]  # which parameters, in which dtype


class HybridReduce(PlainReduce):
    """Shards are replicated (HSDP): each reduced shard is averaged over its replicas.

    Without synchronisation, partial results stay in the reduce dtype and in the layout of their
    reduction, until one with it adds them.
    """

    has_all_reduce = True

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        """Start with the all-reduce on."""
        self._process_group = process_group
        self.all_reduce_enabled = True
        self._partial: dict[_Key, torch.Tensor] = {}
        self._begun: list[tuple[_Key, ReduceInFlight]] = []  # partial ones, in this backward
        self._ended: list[tuple[_Key, ReduceInFlight]] = []  # in one whose end did not wait
        self._sent: list[_Key] = []

    @property
    def unsynced(self) -> bool:
        """Whether partial results wait for an all-reduce."""
        return bool(self._partial or self._ended)

    def launch(self, setup: ReductionSetup, gradients: Gradients) -> InFlight:
        """Return the reduction with its all-reduce, or one that is kept for a later one."""
        for key, earlier in self._ended:
            output = earlier.wait().output
            self._partial[key] = self._partial[key].add_(output) if key in self._partial else output
        self._ended.clear()
        reduction = setup.plan.launch(gradients)
        key = (setup.params, setup.layout.buffer.dtype)
        if not self.all_reduce_enabled:
            self._begun.append((key, reduction))
            return reduction
        # a backward may reduce twice; see [Note: one reduction]
        partial = None if key in self._sent else self._partial.get(key)
        self._sent.append(key)
        return all_reduce_shards(reduction, self._process_group, setup.scaling, partial)

    def synchronise(self, enabled: bool) -> None:
        """Turn the all-reduce on or off."""
        self.all_reduce_enabled = enabled

    def end_of_backward(self) -> None:
        """Drop gradients that travelled in an all-reduce, and keep the others."""
        self._ended += self._begun
        self._begun.clear()
        for key in self._sent:
            self._partial.pop(key, None)
        self._sent.clear()

    def abandon(self, *, keep: bool) -> None:
        """Drop the gradients of an unfinished backward; all gradients if not ``keep``."""
        self._begun.clear()
        self._sent.clear()
        if not keep:
            self._partial.clear()
            self._ended.clear()

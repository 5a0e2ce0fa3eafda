"""The arguments of an FSDP1 instance, under the names of torch's attributes.

Owns the read-only attributes: libraries look at them, and change nothing.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fullshard.wrappers.fsdp1.flat_parameter import FlatParameter, FlatParameterHandle
from fullshard.wrappers.fsdp1.instance import Instance
from fullshard.wrappers.fsdp1.settings import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from fullshard.wrappers.wrapper import Wrapper

__all__ = ["Given"]


class Given(Wrapper):
    """The attributes of an instance.

    Attributes:
        instance: what it knows of itself.
    """

    instance: Instance

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that shard; with NO_SHARD those that all-reduce."""
        return self.instance.ranks.process_group

    @property
    def compute_device(self) -> torch.device:
        """Where it computes."""
        return self.instance.ranks.device

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """The strategy."""
        return self.instance.arguments.strategy

    @property
    def mixed_precision(self) -> MixedPrecision:
        """The dtypes."""
        return self.instance.arguments.precision

    @property
    def cpu_offload(self) -> CPUOffload:
        """Whether shards live on the CPU."""
        return self.instance.arguments.offload

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """When backward gathers the next parameters."""
        return self.instance.arguments.backward_prefetch

    @property
    def forward_prefetch(self) -> bool:
        """Whether forward gathers the next parameters."""
        return self.instance.arguments.forward_prefetch

    @property
    def limit_all_gathers(self) -> bool:
        """What was given: memory is bounded always."""
        return self.instance.arguments.limit_all_gathers

    # Accelerate 1.15 reads these three, to train in float32 what came in less; verl 0.9 the last,
    # to move parameters to the CPU.

    @property
    def _has_params(self) -> bool:
        return any(True for _ in self.instance.own_parameters())

    @property
    def _flat_param(self) -> FlatParameter | None:
        return FlatParameter(self.instance) if self._has_params else None

    @property
    def _handle(self) -> FlatParameterHandle | None:
        return FlatParameterHandle(self.instance) if self._has_params else None

"""The arguments of FSDP1's constructor, checked, and the call of ``fully_shard`` they become.

Owns both. ``fsdp1_mesh`` finds ranks and devices, ``ignored_states`` the ignored modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from torch import nn

from fullshard.sharding import FSDPModule, fully_shard, replicate
from fullshard.wrappers.fsdp1.mesh import Ranks
from fullshard.wrappers.fsdp1.settings import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    offload_policy_of,
    prefetch_policy_of,
    require_kind,
)
from fullshard.wrappers.ignored_states import Ignored

__all__ = ["Fsdp1Arguments", "ShardingCall"]

_FLAGS = ("sync_module_states", "forward_prefetch", "limit_all_gathers", "use_orig_params")


@dataclass(frozen=True, kw_only=True)
class Fsdp1Arguments:
    """The arguments of a constructor, except the module; as ``FullyShardedDataParallel`` says."""

    process_group: Any
    sharding_strategy: Any
    cpu_offload: Any
    auto_wrap_policy: Any
    backward_prefetch: BackwardPrefetch | None
    mixed_precision: Any
    ignored_modules: Any
    param_init_fn: Callable[[nn.Module], None] | None
    device_id: Any
    sync_module_states: bool
    forward_prefetch: bool
    limit_all_gathers: bool
    use_orig_params: bool
    ignored_states: Any
    device_mesh: Any

    def __post_init__(self) -> None:
        """Check what needs no other argument, and take torch's own objects by their fields.

        Raises:
            TypeError: if an argument is of the wrong type.
        """
        for name in _FLAGS:
            require_kind(name, getattr(self, name), bool)
        for name, kind in (
            ("sharding_strategy", ShardingStrategy),
            ("cpu_offload", CPUOffload),
            ("backward_prefetch", BackwardPrefetch),
            ("mixed_precision", MixedPrecision),
        ):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, require_kind(name, getattr(self, name), kind))

    @property
    def strategy(self) -> ShardingStrategy:
        """The strategy that holds."""
        return cast(ShardingStrategy, self.sharding_strategy or ShardingStrategy.FULL_SHARD)

    @property
    def precision(self) -> MixedPrecision:
        """The dtypes that hold."""
        return cast(MixedPrecision, self.mixed_precision or MixedPrecision())

    @property
    def offload(self) -> CPUOffload:
        """Whether shards live on the CPU."""
        return cast(CPUOffload, self.cpu_offload or CPUOffload())

    def for_children(self, ranks: Ranks, ignored: Ignored) -> dict[str, Any]:
        """Return the keyword arguments with which modules below are wrapped."""
        child = replace(
            self,
            auto_wrap_policy=None,
            ignored_modules=None,
            ignored_states=[*ignored.modules, *ignored.params],
        )
        if self.strategy.is_hybrid:  # the same process groups for all
            child = replace(child, process_group=None, device_mesh=ranks.mesh)
        return {each.name: getattr(child, each.name) for each in fields(child)}

    def call(self, ranks: Ranks, ignored: Ignored) -> ShardingCall:
        """Return what they become."""
        replicates = self.strategy is ShardingStrategy.NO_SHARD
        found: dict[str, Any] = {}
        if ranks.mesh is not None:
            found["mesh"] = ranks.mesh
        if self.strategy.keeps_parameters:
            found["reshard_after_forward"] = False
        policies = {
            "mp_policy": self.precision.policy(),
            "offload_policy": offload_policy_of(self.cpu_offload),
        }
        if not replicates:  # it gathers nothing
            policies["prefetch_policy"] = prefetch_policy_of(
                self.backward_prefetch, forward=self.forward_prefetch
            )
        found.update({name: policy for name, policy in policies.items() if policy is not None})
        if ignored.params:
            found["ignored_params"] = set(ignored.params)
        return ShardingCall(replicates=replicates, arguments=found)


@dataclass(frozen=True, kw_only=True)
class ShardingCall:
    """A call of ``fully_shard`` or ``replicate``.

    Attributes:
        replicates: it is ``replicate``.
        arguments: what is not the default.
    """

    replicates: bool
    arguments: Mapping[str, Any]

    @property
    def function(self) -> str:
        """Its name."""
        return "replicate" if self.replicates else "fully_shard"

    def __call__(self, module: nn.Module) -> FSDPModule:
        """Return ``module``, sharded."""
        return (replicate if self.replicates else fully_shard)(module, **self.arguments)

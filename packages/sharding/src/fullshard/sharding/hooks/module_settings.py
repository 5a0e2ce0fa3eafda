"""What is set for one sharded module: by its policies, and by the user between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fullshard.sharding.base.policies import Policies
from fullshard.sharding.hooks.schedule import Order, ShardedModule
from fullshard.sharding.protocols import ModuleCasts, PrefetchPolicy

__all__ = ["ModuleSettings"]


@dataclass(eq=False)
class ModuleSettings:
    """The settings of one module.

    Attributes:
        casts: casts inputs and outputs.
        after_forward, after_backward: say whether to reshard: the policy, or what a user set.
        prefetch: what is gathered ahead.
        forward_prefetch: what the user set to be gathered ahead in forward; replaces the policy.
        backward_prefetch: the same for backward.
        unshard_in_backward: whether backward needs full parameters.
    """

    casts: ModuleCasts
    after_forward: Callable[[bool], bool]
    after_backward: Callable[[bool], bool]
    prefetch: PrefetchPolicy
    forward_prefetch: Sequence[ShardedModule] = ()
    backward_prefetch: Sequence[ShardedModule] = ()
    unshard_in_backward: bool = True

    @classmethod
    def of(cls, policies: Policies) -> ModuleSettings:
        """Return what the policies say."""
        reshard = policies.reshard
        return cls(
            policies.precision, reshard.after_forward, reshard.after_backward, policies.prefetch
        )

    def ahead_in_forward(self, order: Order, place: int, name: str) -> Sequence[ShardedModule]:
        """Return what to gather ahead once ``name`` was gathered at ``place`` of a forward."""
        policy = self.prefetch.in_forward
        return self.forward_prefetch or order.ahead_of(place, name, policy)

    def ahead_in_backward(self, order: Order, place: int, name: str) -> Sequence[ShardedModule]:
        """Return what to gather ahead in the backward of a forward at ``place``."""
        policy = self.prefetch.in_backward
        ahead = self.backward_prefetch or order.ahead_of(place, name, policy)
        return [each for each in ahead if each.unshard_in_backward]

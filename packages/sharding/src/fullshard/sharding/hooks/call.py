"""One call of a sharded module's forward, from its pre-forward to its post-forward.

Owns what the first notes for the second.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fullshard.sharding.base.tensors import tensors_requiring_grad
from fullshard.sharding.hooks.use import Passed, Use

if TYPE_CHECKING:
    from fullshard.sharding.groups.param_group import FSDPParamGroup

__all__ = ["Call", "has_raised"]


@dataclass
class Call:
    """One call of a module's forward.

    Attributes:
        recompute: whether it runs inside a backward.
        leased: the groups for which it holds a FORWARD lease.
        entered: whether it counts in the root's forward.
        use: the forward that a backward may follow; absent where gradients are off.
        passed: what it was given and may change.
        in_transform: whether it runs inside a transform; see [Note: transforms].
    """

    recompute: bool
    leased: list[FSDPParamGroup]
    entered: bool = False
    use: Use | None = None
    passed: Passed | None = None
    in_transform: bool = False

    def watched(self, output: Any) -> list[torch.Tensor]:
        """Returns the tensors that a backward may come through to what the forward did."""
        if self.use is None:
            return []
        tensors = tensors_requiring_grad(output)
        # an error in a change in place leaves the input in a state that torch itself cannot read
        if self.passed is None or has_raised(output):
            return tensors
        if self.passed.has_new_node():
            self.use.calls += 1  # more than are ever reached, see [Note: passed input]
        return [*tensors, *self.passed.changed()]


def has_raised(output: Any) -> bool:
    """Tells in a post-forward hook whether forward raised: then there is no output."""
    return output is None and sys.exception() is not None

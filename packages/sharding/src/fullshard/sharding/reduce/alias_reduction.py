"""Gradients that are their own reduction, since a world of one adds nothing to them.

Owns the question when that is so, and such a reduction: in flight for as long as it takes to ask
for its result. The sharded gradient is the tensor that autograd made. Refuses what is to be cast,
scaled, or added to zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fullshard.comm import Layout, ReducedShards, ReduceLane
from fullshard.sharding.base.alone import is_alone

__all__ = ["AliasedReduction", "aliased_reduction"]


@dataclass(frozen=True)
class AliasedReduction:
    """A reduction that was over before it began.

    Attributes:
        result: the gradients; without marks, since none is missing.
    """

    result: ReducedShards

    @property
    def ready(self) -> bool:
        """True."""
        return True

    def advance(self) -> None:
        """Nothing follows."""

    def land(self) -> None:
        """There is nothing to wait for."""

    def wait(self) -> ReducedShards:
        """Returns the gradients."""
        return self.result


def aliased_reduction(
    gradients: Sequence[torch.Tensor | None], layout: Layout, lane: ReduceLane
) -> AliasedReduction | None:
    """Returns the reduction of gradients that can be used as they lie: all of them, or None.

    The lane's collective says that nothing is to be moved or encoded. A gradient that is part of a
    graph stays with the graph.
    """
    if not is_alone(lane) or not lane.scaling.is_identity:
        return None
    dtype, shards = layout.buffers[0].dtype, []
    for gradient, spec in zip(gradients, layout.specs, strict=True):
        if (
            gradient is None
            or type(gradient) is not torch.Tensor
            or gradient.dtype is not dtype
            or gradient.requires_grad
            or not gradient.is_contiguous()
            or gradient.device != lane.device
        ):
            return None
        shards.append(gradient.view(spec.laid_shape))
    return AliasedReduction(ReducedShards(shards=shards, marks=None, output=shards[0]))

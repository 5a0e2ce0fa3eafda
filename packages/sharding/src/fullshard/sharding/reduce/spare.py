"""The memory of gradients, which a group's next reduction fills again.

Owns the results of finished reductions, until the next one of the same layout, and the question
whether anybody still looks at them. Without streams new memory costs page faults, and tensors over
it more host time than the reduction. Refuses devices with streams, where a freed gradient had
better serve others: what an allocator keeps.

Large results are not kept: from the end of a step until the next reduction they would be memory
that nobody uses, beside the activations of that step.

[Note: spare results] A result becomes gradients. ``zero_grad()`` lets go of them, but a user may
have kept one, a view of one, or an array over one. All of these count as references to a tensor or
to its memory, so a result of which nobody else has any is nobody's, and is filled again; any other
is left alone, and forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence

from fullshard.comm import Layout, ReducedShards, are_held_by
from fullshard.sharding.base.compat import local_shard
from fullshard.sharding.params.param import FSDPParam

__all__ = ["SpareResults"]


_LARGEST = 1 << 18  # bytes of a result that is kept


class SpareResults:
    """The results of one group's last reductions."""

    def __init__(self) -> None:
        """Starts with none."""
        self._results: dict[Layout, ReducedShards] = {}

    @staticmethod
    def may_keep(layout: Layout) -> bool:
        """Whether results of ``layout`` are small enough."""
        return sum(spec.slice_nbytes for spec in layout.buffers) <= _LARGEST

    def keep(self, layout: Layout, result: ReducedShards) -> None:
        """Takes the result of a reduction that was committed."""
        self._results[layout] = result

    def take(self, layout: Layout, params: Sequence[FSDPParam]) -> ReducedShards | None:
        """Returns memory for the next result of ``layout``, if there is some that nobody uses.

        Args:
            layout: of the reduction.
            params: whose gradients it carries, in the order of the layout.
        """
        result = self._results.pop(layout, None)
        if result is None:
            return None
        kept = [param.made_gradient for param in params]
        over = [
            gradient is not None and local_shard(gradient) is shard
            for gradient, shard in zip(kept, result.shards, strict=True)
        ]
        made = [gradient for gradient in kept if gradient is not None]
        holders = [2] * len(made)  # the parameter, and the list above
        if any(each.requires_grad for each in made) or not are_held_by(made, holders):
            return None
        return result if result.is_spare([int(each) for each in over]) else None

    def forget(self) -> None:
        """Gives the memory back."""
        self._results.clear()

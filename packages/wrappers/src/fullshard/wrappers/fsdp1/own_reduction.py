"""A communication hook in the place of a sharded module's own reduction.

Owns the two ways: a reduce-scatter that calls the hook and, where nothing is sharded, the end of a
reduction that calls it instead of an all-reduce. The hook divides, so the engine does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm import ReduceOp, ReduceScatter
from fullshard.sharding import FSDPModule
from fullshard.sharding.spi import PlainReduce, the_states

__all__ = ["HookedReduceScatter", "reduce_by_hook"]


class HookedReduceScatter(ReduceScatter):
    """A reduce-scatter that is what a hook does."""

    def __init__(self, hook: Callable[..., Any], state: object) -> None:
        """Take the hook and what it is called with first."""
        self._hook = hook
        self._state = state

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor from the caching allocator."""
        return torch.empty(size, dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> None:
        """Call the hook with its state, the input and the output.

        With aliases of both: hooks put tensors of other dtypes into their arguments' ``data``.
        """
        output = output_tensor.view_as(output_tensor)
        self._hook(self._state, input_tensor.view_as(input_tensor), output)
        _keep(output, output_tensor)


def reduce_by_hook(module: FSDPModule, hook: Callable[..., Any], state: object) -> None:
    """Make the gradients of ``module``'s own group be reduced by ``hook``. Not recursive.

    Args:
        module: a module given to ``fully_shard`` on a 1-D mesh, or to ``replicate``.
        hook: called with ``state``, the flat gradients of all ranks' shards (``[world * n]``) and
            where to put this rank's (``[n]``); for a replicated module with ``state`` and the flat
            gradients, which it changes in place. Behind the gradients of each shard stand marks,
            positive where any rank has a gradient, which sums and means keep so.
        state: anything.
    """
    module.set_gradient_divide_factor(1.0)
    for each in the_states(module, recurse=False):
        for group in each.own_groups:
            if group.mesh_info.shard_mesh_dim is not None:
                group.gradients.setups.change(comm=HookedReduceScatter(hook, state))
            else:
                group.gradients.setups.strategy = PlainReduce()
                group.gradients.setups.change(hook=_in_place(hook, state))


def _in_place(hook: Callable[..., Any], state: object) -> Callable[[torch.Tensor], None]:
    def reduce(buffer: torch.Tensor) -> None:
        alias = buffer.view_as(buffer)
        hook(state, alias)
        _keep(alias, buffer)

    return reduce


def _keep(alias: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy into ``tensor`` what was put into the ``data`` of its alias, if anything was."""
    if alias.data_ptr() != tensor.data_ptr() or alias.dtype != tensor.dtype:
        tensor.copy_(alias)

"""Settings of a step: what stays gathered, what is gathered ahead, who finishes a backward.

``FSDPModule`` inherits these methods, under torch's names. A method checks its arguments and
changes the module's state; only ``finalize_backward`` communicates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fullshard.sharding.api.handles import GradientReductionHandle
from fullshard.sharding.base.checks import require_bool
from fullshard.sharding.base.compat import untraced
from fullshard.sharding.hooks.lookup import (
    groups_of,
    initialised_state,
    state_of,
    the_root,
    the_state,
    the_states,
)
from fullshard.sharding.hooks.module_state import ModuleState
from fullshard.sharding.mesh.placements import ShardingPlacements, placed_anew
from fullshard.sharding.protocols import FixedReshard

__all__ = ["StepSettings", "states_of"]


@untraced
class StepSettings:
    """The step settings of a sharded module."""

    # -- the end of a backward --------------------------------------------------------------------

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward is the last one before the gradients are used.

        If not, its end does not wait for reductions; their gradients appear with the last. With
        ``placements=``, such a backward reduces over the axes of ``gradients`` only.

        Raises:
            TypeError: if ``is_last_backward`` is not a bool.
        """
        require_bool("is_last_backward", is_last_backward)
        context = initialised_state(self).context
        context.is_last_backward = is_last_backward
        for group in context.groups:
            group.gradients.announce_last(is_last_backward)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Choose who finishes the backward of all groups under this root.

        By default each backward does at its end: it reduces gradients that no module's own backward
        reduced, and reshards. With ``enabled`` nothing is reduced until ``finalize_backward()``,
        and gradients stay on the unsharded parameters. A group that a backward left unsharded stays
        unsharded if synchronisation is on; else it reshards according to
        ``set_reshard_after_backward``. Pipeline schedules need this. Set it on the root, before the
        forward.

        Raises:
            TypeError: if ``enabled`` is not a bool.
            RuntimeError: on a module that is not the root, or in the middle of a forward or
                backward.
        """
        require_bool("enabled", enabled)
        context = the_root(self, "set_manual_backward_finalization").context
        context.require_quiet("set_manual_backward_finalization")
        context.finalizes_by_hand = enabled

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Finish the backward of all groups under this root, after the last backward of a step.

        Reduces the accumulated gradients, if synchronisation is on. Reshards according to
        ``set_reshard_after_backward``. Call it on the root, on every rank. Before the first forward
        there is nothing to finish.

        Args:
            async_op: return before the reductions are over.

        Returns:
            A handle to wait on if ``async_op``, or None.

        Raises:
            TypeError: if ``async_op`` is not a bool.
            RuntimeError: on a module that is not the root, without
                ``set_manual_backward_finalization(True)``, or in the middle of a forward or
                backward.
        """
        require_bool("async_op", async_op)
        if not the_state(self).initialised:
            return GradientReductionHandle() if async_op else None
        context = the_root(self, "finalize_backward").context
        if not context.finalizes_by_hand:
            raise RuntimeError(
                "finalize_backward() was called, but each backward finishes by itself; call "
                "set_manual_backward_finalization(True) before the forward"
            )
        context.finalize_backward()
        handle = GradientReductionHandle(context.commit)
        if async_op:
            return handle
        handle.wait()
        return None

    # -- resharding and prefetch ------------------------------------------------------------------

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change ``reshard_after_forward``, also for the root if it is this module.

        Args:
            reshard_after_forward: whether to free full parameters after forward.
            recurse: set it for all sharded modules below, too.

        Raises:
            TypeError: if an argument is not a bool.
        """
        require_bool("reshard_after_forward", reshard_after_forward)
        for state in the_states(self, recurse):
            policy = FixedReshard(forward=reshard_after_forward)
            state.settings.after_forward = policy.after_forward
            state.be_root(state.is_root)
            for group in state.own_groups:
                group.reshard()
                group.gathering.setup.set_post_forward_mesh(None)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Change whether full parameters are freed after backward.

        Parameters that are not freed are used in the next forward, unless they change before it.

        Args:
            reshard_after_backward: whether to free full parameters after backward.
            recurse: set it for all sharded modules below, too.

        Raises:
            TypeError: if an argument is not a bool.
        """
        require_bool("reshard_after_backward", reshard_after_backward)
        for state in the_states(self, recurse):
            policy = FixedReshard(backward=reshard_after_backward)
            state.settings.after_backward = policy.after_backward
            state.be_root(state.is_root)

    def set_placements(self, placements: ShardingPlacements, *, recurse: bool = True) -> None:
        """Change ``placements=`` between steps, where the optimizer keeps its shards.

        Args:
            placements: the new ones.
            recurse: set it for all sharded modules below, too.

        Raises:
            TypeError: if ``placements`` is no ``ShardingPlacements``, or ``recurse`` not a bool.
            ValueError: if the new placements cut parameters otherwise than the present ones, or
                keep full parameters, which the schedule does not allow.
            RuntimeError: in the middle of a forward or backward.
        """
        require_bool("recurse", recurse)
        states = the_states(self, recurse)
        the_state(self).context.require_quiet("set_placements")
        placed = [placed_anew(state.mesh_info, placements) for state in states]
        for state, each in zip(states, placed, strict=True):
            if each.keeps_full and not state.context.schedule.allows_kept_groups:
                raise ValueError(
                    f"{placements!r} keep full parameters within a step, which "
                    f"{type(state.context.schedule).__name__} does not allow; pass placements "
                    "without compute=(), or call set_schedule(None) before"
                )
        for state, each in zip(states, placed, strict=True):
            for group in state.own_groups:
                group.gathering.keep_full(each.keeps_full)
                group.gradients.early_reduction = each.early_reduction
                group.gradients.announce_last(state.context.is_last_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward needs this module's full parameters: an embedding's does not.

        Not recursive.

        Raises:
            TypeError: if ``unshard_in_backward`` is not a bool.
        """
        require_bool("unshard_in_backward", unshard_in_backward)
        the_state(self).settings.unshard_in_backward = unshard_in_backward

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Keep the memory of full parameters at one address from step to step.

        Resharding then registers the sharded parameters, but frees no memory. The next gather
        writes to the same memory, so a CUDA graph that reads it stays valid when weights change.
        From then on, the full parameters of these modules are in memory at once. Call it before the
        first forward, on every rank alike.

        Args:
            keep: whether to; False frees the memory of what is sharded now.
            recurse: set it for all sharded modules below, too.

        Raises:
            TypeError: if an argument is not a bool.
            RuntimeError: in the middle of a forward or backward.
        """
        require_bool("keep", keep)
        groups = groups_of(self, recurse)
        the_state(self).context.require_quiet("set_keep_unsharded_storage")
        for group in groups:
            group.gathering.keep_storage(keep)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Make the next forward's gathers wait for ``event`` instead of all work issued so far.

        Record it after the optimizer's step, on the root; it serves once.

        Raises:
            TypeError: if ``event`` is no event.
        """
        if not (hasattr(event, "wait") and hasattr(event, "record")):
            raise TypeError(
                f"event is a {type(event).__name__}; pass a torch.Event that was recorded after "
                "optimizer.step()"
            )
        initialised_state(self).context.post_optim_event = event

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather ``modules`` ahead, in this order, after this module's own gather in forward.

        Raises:
            TypeError: if one element is not sharded.
        """
        the_state(self).settings.forward_prefetch = states_of(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather ``modules`` ahead, in this order, after this module's own gather in backward.

        Replaces the default, the module before this one in forward order.

        Raises:
            TypeError: if one element is not sharded.
        """
        the_state(self).settings.backward_prefetch = states_of(modules)


def states_of(modules: Sequence[nn.Module]) -> list[ModuleState]:
    """Return the states of sharded modules.

    Raises:
        TypeError: if ``modules`` is not a list, or one element is not sharded.
    """
    if not isinstance(modules, (list, tuple)):
        raise TypeError(f"modules is a {type(modules).__name__}; pass a list of sharded modules")
    found = [state_of(each) if isinstance(each, nn.Module) else None for each in modules]
    for module, state in zip(modules, found, strict=True):
        if state is None:
            raise TypeError(
                f"modules holds a {type(module).__name__}, which is not sharded; call fully_shard "
                "on it first"
            )
    return [state for state in found if state is not None]

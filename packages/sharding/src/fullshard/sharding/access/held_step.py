"""Full parameters for all micro-batches of a step: gathered once, gradients reduced once.

``HeldStep`` keeps what the first micro-batch gathers, and lets gradients add up on the unsharded
parameters. ``HeldStep`` itself gathers nothing: the forwards of the modules do. ``PipelineStage``
of ``fullshard.wrappers.pipelining`` begins and ends steps.
"""

from __future__ import annotations

from torch import nn

from fullshard.sharding.base.states import LeaseKind
from fullshard.sharding.groups.param_group import FSDPParamGroup
from fullshard.sharding.hooks.context import RootContext
from fullshard.sharding.hooks.lookup import the_states

__all__ = ["HeldStep"]


class HeldStep:
    """A step of a module in several forwards and backwards.

    Call ``release`` after the last backward, then ``wait``; or ``abandon`` if the step raised.

    Attributes:
        groups: the groups that are held; empty if nothing in the module is sharded.
    """

    def __init__(self, module: nn.Module, *, has_backward: bool) -> None:
        """Begin the step.

        Args:
            module: a sharded module, or one that holds sharded modules.
            has_backward: whether backwards follow the forwards.

        Raises:
            RuntimeError: in the middle of a forward or backward.
        """
        states = the_states(module, recurse=True)
        for state in states:
            state.ensure_initialised()
        roots: dict[RootContext, None] = dict.fromkeys([state.context for state in states])
        groups: dict[FSDPParamGroup, None] = dict.fromkeys(
            [group for state in states for group in state.groups]
        )
        for root in roots:
            root.require_quiet("schedule.step")
        self.groups = tuple(groups)
        self._has_backward = has_backward
        self._roots = tuple(roots)
        self._by_hand = [root.finalizes_by_hand for root in self._roots]
        self._synced = [group.gradients.synchronises for group in self.groups]
        for root in self._roots:
            root.finalizes_by_hand |= has_backward
        for group in self.groups:
            group.leases.add_once(LeaseKind.STEP)
            group.gradients.synchronises &= not has_backward

    def release(self) -> None:
        """End the step: reshard, and launch the reductions if synchronisation is on."""
        self._restore()
        for root in self._roots if self._has_backward else ():
            root.finalize_backward()
        for group in self.groups:
            group.reshard_if_unheld()

    def wait(self) -> None:
        """Wait for the reductions, and set the sharded gradients."""
        for root, by_hand in zip(self._roots, self._by_hand, strict=True):
            if self._has_backward:
                root.commit()
            root.finalizes_by_hand = by_hand

    def abandon(self) -> None:
        """End a step that raised: drop what its backwards left."""
        self._restore()
        for root, by_hand in zip(self._roots, self._by_hand, strict=True):
            root.reset()
            root.finalizes_by_hand = by_hand
        for group in self.groups:
            group.reshard_if_unheld()

    def _restore(self) -> None:
        for group, synced in zip(self.groups, self._synced, strict=True):
            group.leases.drop(LeaseKind.STEP)
            group.gradients.synchronises = synced

"""Full parameters for all micro-batches of a step: gathered once, gradients reduced once.

``HeldStep`` keeps what the first micro-batch gathers, and lets gradients add up on the unsharded
parameters. ``HeldStep`` itself gathers nothing: the forwards of the modules do. ``PipelineStage``
of ``pipelining`` begins and ends steps.
"""

from __future__ import annotations

from torch import nn

from fullshard.sharding import LeaseKind
from fullshard.sharding.spi import the_states

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
        self._has_backward = has_backward
        self._by_hand = {state.context: state.context.finalizes_by_hand for state in states}
        self._synced = {
            group: group.gradients.synchronises for state in states for group in state.groups
        }
        self.groups = tuple(self._synced)
        for root in self._by_hand:
            root.require_quiet("schedule.step")
        for root in self._by_hand:
            root.finalizes_by_hand |= has_backward
        for group in self.groups:
            group.leases.add_once(LeaseKind.STEP)
            group.gradients.synchronises &= not has_backward

    def release(self) -> None:
        """End the step: reshard, and launch the reductions if synchronisation is on."""
        self._restore()
        for root in self._by_hand if self._has_backward else ():
            root.finalize_backward()
        for group in self.groups:
            group.reshard_if_unheld()

    def wait(self) -> None:
        """Wait for the reductions, and set the sharded gradients."""
        for root, by_hand in self._by_hand.items():
            if self._has_backward:
                root.commit()
            root.finalizes_by_hand = by_hand

    def abandon(self) -> None:
        """End a step that raised: drop what its backwards left."""
        self._restore()
        for root, by_hand in self._by_hand.items():
            root.reset()
            root.finalizes_by_hand = by_hand
        for group in self.groups:
            group.reshard_if_unheld()

    def _restore(self) -> None:
        for group, synced in self._synced.items():
            group.leases.drop(LeaseKind.STEP)
            group.gradients.synchronises = synced

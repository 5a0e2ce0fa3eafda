"""One grad-enabled forward of a module, until its backward ended or its graph was freed.

Owns the token that autograd holds. [Note: forward pass] The hooks on the module's outputs and the
node before its inputs, or the hook on that node, hold the only strong references to a
``ForwardPass``, so when the last of them goes, the graph went, and what the pass held is released.
Nothing else may keep a ``ForwardPass`` alive; groups know it by number. A graph may be freed on any
thread: then that is only noted, and released at the next outermost forward or end of a backward. It
never changes what is communicated; see [Note: shared facts]. torch's ``fully_shard`` has no such
token: there an output that is dropped without a backward leaves its group unsharded.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

__all__ = ["ForwardPass"]

_numbers = itertools.count(1)


class ForwardPass:
    """A forward that a backward may follow.

    Attributes:
        number: unique in this process; the owner of its leases.
        position: its place in the post-forward order, from which backward prefetches.
        calls: module calls that belong to it: one per module of the list that ran.
        reached: those whose inputs backward has reached. A call without an input that requires a
            gradient is never reached, so the end of backward ends the pass.
        first_node: the number of the first autograd node of its latest call.
        recompute: whether it runs inside a backward.
        in_backward: whether a backward reached its outputs.
        done: whether its backward ended.
    """

    def __init__(self, expired: Callable[[int, int], None], *, recompute: bool) -> None:
        """Begins it. ``expired``: told its number and thread if its graph is freed first."""
        self.number = next(_numbers)
        self.position = -1
        self.calls = 0
        self.reached = 0
        self.first_node = 0
        self.recompute = recompute
        self.in_backward = False
        self.done = False
        self._expired = expired
        self._thread = threading.get_ident()

    def begin_backward(self) -> None:
        """Enters its backward, or enters it again: a graph that was retained is run once more.

        Then it counts as outstanding no longer, so the end of that backward reduces its groups.
        """
        if self.done:
            self.done = False
            self.reached = 0
        self.in_backward = True

    def close(self) -> None:
        """Counts no longer: its backward ended."""
        self.done = True
        self.in_backward = False

    def __del__(self) -> None:
        """Releases what the forward held, if its graph was freed without a backward."""
        if not self.done:
            self._expired(self.number, self._thread)

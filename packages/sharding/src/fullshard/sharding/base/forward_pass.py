"""Grad-enabled forwards until their backward, and those of a group that still await one.

Owns the token that autograd holds, and per group the parameter generation: a counter, which moves
on when an optimizer that holds a parameter of the group's root steps, and within a step before each
call of its closure; when a state dict is loaded, when full parameters are written back, and when
the user says so with ``parameters_changed()``. Tensor version counters cannot serve: foreach and
fused optimizers do not move them on every build.

[Note: forward pass] The hooks on the module's outputs and the
node before its inputs, or the hook on that node, hold the only strong references to a
``ForwardPass``, so when the last of them goes, the graph went, and what the pass held is released.
Nothing else may keep a ``ForwardPass`` alive; groups know it by number. A graph may be freed on any
thread: then that is only noted, and released at the next outermost forward or end of a backward. It
never changes what is communicated. torch's ``fully_shard`` has no such token: there an output that
is dropped without a backward leaves its group unsharded.

[Note: shared facts] What a rank communicates may depend only on what all ranks see alike: forwards,
backwards, optimizer steps. When a graph dies is not such a thing: rank 0 may keep an output in a
list, a cycle may wait for the garbage collector, a worker thread may drop the last reference late.
So the death of a graph gives memory back, and a forward whose graph died counts as outstanding
until the parameters change.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

__all__ = ["ForwardPass", "ParameterGeneration"]

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


class ParameterGeneration:
    """The version of one group's parameters, and the forwards of it that no backward has ended.

    Attributes:
        number: that of the present generation.
    """

    def __init__(self) -> None:
        """Starts with the first, and no forward."""
        self.number = 0
        self.forget_passes()

    def forget_passes(self) -> None:
        """Counts no forward any more."""
        self._passes: set[int] = set()
        self._expired = False

    def advance(self) -> None:
        """Declares every copy made so far stale, and forwards that await their backward ended."""
        self.number += 1
        self.forget_passes()

    @property
    def outstanding(self) -> bool:
        """Whether any forward of this generation awaits its backward."""
        return self._expired or bool(self._passes)

    def awaits(self, number: int) -> bool:
        """Tells whether forward ``number`` does."""
        return number in self._passes

    def add(self, number: int) -> None:
        """Counts a forward."""
        self._passes.add(number)

    def expire(self, number: int) -> None:
        """Stops tracking a forward whose graph died; that one awaited its backward stays a fact."""
        if number in self._passes:
            self._passes.discard(number)
            self._expired = True

    def end(self, number: int) -> bool:
        """Ends a forward, and tells whether it was counted and is the last."""
        counted = number in self._passes
        self._passes.discard(number)
        return counted and not self._passes and not self._expired

"""Grad-enabled forwards until their backward, and those of a group that still await one.

Owns the token that autograd holds, the nodes around a module's inputs and outputs that hold it, and
per group the parameter generation: a counter. The counter increases when an optimizer with a
parameter of the group's root steps, and in a step before each call of its closure; also when a
state dict is loaded, when full parameters are written back, and when the user calls
``parameters_changed()``. Tensor version counters are not enough: foreach and fused optimizers do
not move them on every build.

[Note: forward pass] The hooks on the module's outputs, and the node before its inputs or the hook
on that node, hold the only strong references to a ``ForwardPass``. When the last reference is gone,
the graph is gone too, and everything that the pass held is released. No other object may keep a
``ForwardPass`` alive; groups know it by number. A graph may be freed on any thread: then that is
only noted, and released at the next outermost forward or end of a backward. The death of a graph
never changes the communication. torch's ``fully_shard`` has no such token: there an output that is
dropped without a backward leaves its group unsharded.

[Note: shared facts] What a rank communicates may depend only on what all ranks see alike: forwards,
backwards, optimizer steps. When a graph dies is not such a thing: rank 0 may keep an output in a
list, a cycle may wait for the garbage collector, a worker thread may drop the last reference late.
The death of a graph only frees memory. A forward whose graph died counts as outstanding until the
parameters change.

[Note: passed input] While forward runs, an input that requires a gradient is a view of itself; see
[Note: stand-ins]. The node of the view reports that backward reached the input. When backward
begins, autograd knows which of these nodes it will reach; after the last of them, backward has left
the module. A node that joined all inputs would lead into the graphs of tensors that the module only
passes on. A module may change an input in place, as it may without us: then autograd gives view and
input new nodes, in which the module's parameters may have a part. The input is therefore watched
as the outputs are. No event shows that backward is past the module, so the end of backward ends the
pass. Tensors that require no gradient are passed unchanged; if one requires a gradient afterwards,
it is watched, too. So is a tensor that forward put into a container among its arguments. torch's
``fully_shard`` passes all inputs through one node of its own, and so forbids the change.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch

from fullshard.comm.spi import NOTHING
from fullshard.sharding.base.compat import (
    add_tensor_hook,
    node_made_since,
    sequence_of,
    untraced,
    will_execute,
    without_torch_function,
)
from fullshard.sharding.base.stand_ins import Args, Inputs, Kwargs, StandIns
from fullshard.sharding.base.tensors import is_plain, tensors_in
from fullshard.sharding.extension import GroupExtension

__all__ = ["Call", "CallInputs", "ForwardPass", "ParameterGeneration", "Root"]

_Hook: TypeAlias = Callable[..., Any]  # what backward calls, with whatever autograd hands a hook

_numbers = itertools.count(1)
_NO_CONTAINERS = {torch.Tensor, bool, int, float, str, type(None)}  # by far the most arguments
_EXPIRED = 0  # stands for every forward whose graph died


class CallInputs:
    """The autograd nodes before the inputs of one call; only the graph after the call holds them.

    Attributes:
        nodes: those of the inputs that require a gradient.
        awaited: per node the backward that was to reach it, when it reached the outputs.
        unseen: 1 if no node shows that backward left the call; else 0.
        cast: inputs that were cast, or moved to another device.
        announced_in: the backward that reached the outputs of the call last.
    """

    __slots__ = ("announced_in", "awaited", "cast", "nodes", "unseen")

    def __init__(self) -> None:
        """Start without an input."""
        self.nodes: list[torch.autograd.graph.Node] = []
        self.awaited: list[list[int]] = []
        self.unseen = 1
        self.cast: list[weakref.ref[torch.Tensor]] = []
        self.announced_in = -1


class ForwardPass:
    """A forward that a backward may follow.

    Attributes:
        number: unique in this process; the owner of its leases.
        place: its place in the post-forward order, from which backward prefetches.
        calls: module calls that belong to it: one per module of the list that ran.
        inputs: how many inputs these calls have, of all that backward could reach.
        first_node: the number of the first autograd node of its latest call.
        recompute: whether it runs inside a backward.
        in_backward: whether a backward reached its outputs.
        done: whether its backward ended.
    """

    def __init__(self, expired: Callable[[int, int], None], *, recompute: bool) -> None:
        """Begin it. ``expired``: called with its number and thread if its graph is freed first."""
        self.number = next(_numbers)
        self.place = -1
        self.calls = self.inputs = 0
        self.first_node = 0
        self.recompute = recompute
        self.in_backward = False
        self.done = False
        self._backwards = 0
        # calls and inputs in this backward
        self._announced = self._awaited = self._reached = self._reached_awaited = 0
        self._expired = expired
        self._thread = threading.get_ident()

    def begin_backward(self) -> None:
        """Enter its backward, or enter it again: a graph that was retained is run once more.

        Then it counts as outstanding no longer, so the end of that backward reduces its groups.
        """
        if self.done:
            self.done = False
            self._announced = self._awaited = self._reached = self._reached_awaited = 0
            self._backwards += 1
        self.in_backward = True

    def announce(self, inputs: CallInputs) -> bool:
        """Count the inputs of a call that backward will reach; return whether that was due.

        The announcement is due when a backward reaches the first output of the call.
        """
        if inputs.announced_in == self._backwards:
            return False
        inputs.announced_in = self._backwards
        self._announced += 1
        self._awaited += inputs.unseen
        for node, awaited in zip(inputs.nodes, inputs.awaited, strict=True):
            if will_execute(node):
                awaited[0] = self._backwards
                self._awaited += 1
        return True

    def reach_input(self, awaited: list[int]) -> bool:
        """Count an input that backward reached; return whether backward has left all calls.

        The backward inside a reentrant checkpoint reaches inputs that the outer one does not await.
        """
        self._reached += 1
        self._reached_awaited += awaited[0] == self._backwards
        if self.done:
            return False
        if self._announced < self.calls:
            return self._reached >= self.inputs
        return awaited[0] == self._backwards and self._reached_awaited >= self._awaited

    def close(self) -> None:
        """Counts no longer: its backward ended."""
        self.done = True
        self.in_backward = False

    @untraced
    def __del__(self) -> None:
        """Release what the forward held, if its graph was freed without a backward."""
        if not self.done:
            self._expired(self.number, self._thread)


@dataclass(slots=True)
class Call:
    """A call of a module's forward.

    Attributes:
        recompute: whether it runs inside a backward.
        backwards_before: how many backwards had ended when it began.
        leased: for how many of the module's groups it holds a FORWARD lease.
        position: its place in the order of the root's forward; -1: it has none.
        forward_pass: the forward that a backward may follow; absent where gradients are off.
        contexts: those in which forward runs; None: there are none.
        in_transform: whether it runs inside a transform; see [Note: transforms].
        stand_ins: what its inputs hold while it runs.
        inputs: the nodes before its inputs.
        watched: inputs that required a gradient when it began.
        others: inputs that required none.
        containers: arguments into which forward may put other tensors.
    """

    recompute: bool
    backwards_before: int
    leased: int = 0
    position: int = -1
    forward_pass: ForwardPass | None = None
    contexts: ExitStack | None = None
    in_transform: bool = False
    stand_ins: StandIns = field(init=False)
    inputs: CallInputs = field(default_factory=CallInputs)
    watched: Sequence[torch.Tensor] = ()
    others: Sequence[torch.Tensor] = ()
    containers: Sequence[Any] = ()

    def __post_init__(self) -> None:
        """Start without a stand-in."""
        self.stand_ins = StandIns(exchanges=not self.recompute)

    def enter(self, context: AbstractContextManager[object] | None) -> None:
        """Let forward run in ``context``, if there is one."""
        if context is not None:
            if self.contexts is None:
                self.contexts = ExitStack()
            self.contexts.enter_context(context)

    def leave(self) -> None:
        """Leave the contexts: forward has run, or was interrupted."""
        if self.contexts is not None:
            self.contexts.close()

    def watch_inputs(self, post_backward: _Hook, args: Args, kwargs: Kwargs) -> Inputs:
        """Make the backward that reaches an input call ``post_backward``; return the arguments.

        ``post_backward`` is called with the forward pass and the gradient of the input. If no input
        requires a gradient, the end of backward ends the pass.
        """
        forward_pass = self.forward_pass
        assert forward_pass is not None, "gradients are on"
        forward_pass.calls += 1
        if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:  # as most are called
            found: Sequence[torch.Tensor] = args
        else:
            found = tensors_in((args, kwargs))
            values = (*args, *kwargs.values())
            self.containers = [each for each in values if type(each) not in _NO_CONTAINERS]
        self.watched = [tensor for tensor in found if tensor.requires_grad]
        self.others = [tensor for tensor in found if not tensor.requires_grad]
        views = []
        for tensor in self.watched:
            view = _view_with_node(tensor)
            views.append(view)
            if view is not tensor:
                awaited = [-1]
                view.grad_fn.register_hook(partial(post_backward, forward_pass, awaited))
                self.inputs.nodes.append(view.grad_fn)
                self.inputs.awaited.append(awaited)
        if self.inputs.nodes:
            forward_pass.first_node = sequence_of(self.inputs.nodes[0])
            self.inputs.unseen = 0
            self.stand_ins.put(self.watched, views)
        forward_pass.inputs += self.inputs.unseen + len(self.inputs.nodes)
        return self.stand_ins.applied(args, kwargs)

    def watch_output(self, pre_backward: _Hook, output: Any) -> ForwardPass | None:
        """Make the first gradient that reaches what the forward did call ``pre_backward``.

        The hook comes before those of the modules inside: a module that ranks skip may be the last
        inside, and only then do this module and the one before have one output.

        Returns:
            The forward pass if a backward may follow it: if any tensor that forward returned,
            changed, or put into an argument requires a gradient. ``pre_backward`` is called with
            it.
        """
        forward_pass = self.forward_pass
        if forward_pass is None:
            return None
        found = [output] if type(output) is torch.Tensor else tensors_in(output)
        changed: list[torch.Tensor] = []
        # an error in a change in place leaves the input in a state that torch itself cannot read
        if output is not None or sys.exception() is None:
            changed = [view for view in self.stand_ins.changed() if view.requires_grad]
            if changed:  # their nodes are lost
                forward_pass.inputs += 1
                self.inputs.unseen = 1
            found = [*found, *self.others, *changed]
            if self.containers:
                found += tensors_in(self.containers)
            self.inputs.cast = self.stand_ins.cast()
        # an input that is returned has gradients of other modules
        inputs = self.stand_ins.inputs().union(map(id, self.watched))
        tensors = [each for each in found if each.requires_grad and id(each) not in inputs]
        hook = partial(pre_backward, forward_pass, self.inputs)
        for tensor in tensors:
            add_tensor_hook(tensor, hook)
            node = node_made_since(tensor, forward_pass.first_node)
            if node is not None:  # a view, which its user may change in place
                node.register_prehook(hook)
        return forward_pass if tensors else None


def _view_with_node(tensor: torch.Tensor) -> Any:
    """Return a view of ``tensor`` with an autograd node of its own, or ``tensor`` if it has none.

    A subclass may return what it likes for a view, and a tensor made in inference mode has views
    without a node.
    """
    with without_torch_function() if type(tensor) is not torch.Tensor else NOTHING:
        view = tensor.view_as(tensor)
    alike = type(view) is type(tensor) or (is_plain(view) and is_plain(tensor))
    return view if alike and view.grad_fn is not None else tensor


class Root(Protocol):
    """The calls of a root that its groups make."""

    def enter_backward(self) -> None:
        """Begin a backward if none is in progress."""

    def end_raised_backward(self) -> None:
        """End a backward that raised, if nothing is in progress."""


class ParameterGeneration:
    """The version of one group's parameters, and the group's outstanding forwards.

    Attributes:
        number: that of the present generation.
        replacements: how often a tensor of the group, or a place that holds one, was replaced.
            Lists of these tensors and places are read again when it has changed.
        data_was_set: whether ``data`` of a sharded parameter was; see [Note: data].
        outstanding: the numbers of the forwards of this generation that await their backward.
        extensions: of the group; see ``GroupExtension``.
    """

    def __init__(self) -> None:
        """Start with the first, and no forward."""
        self.number = 0
        self.replacements = 0
        self.data_was_set = False
        self.outstanding: set[int] = set()
        self.extensions: Sequence[GroupExtension] = ()

    def advance(self) -> None:
        """Mark full parameters gathered so far as stale, and clear the outstanding forwards."""
        self.number += 1
        self.outstanding.clear()
        for each in self.extensions:
            each.on_step()

    def expire(self, number: int) -> None:
        """Stop tracking a forward whose graph died; that one awaited its backward stays a fact."""
        if number in self.outstanding:
            self.outstanding.discard(number)
            self.outstanding.add(_EXPIRED)

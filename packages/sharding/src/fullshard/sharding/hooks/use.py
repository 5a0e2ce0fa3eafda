"""One grad-enabled forward of a module, until its backward ended or its graph died.

Owns the token that autograd holds. [Note: use] The hooks on the module's outputs and the node
before its inputs, or the hook on that node, hold the only strong references to a ``Use``, so when
the last of them goes, the graph went, and what it held is given back. Nothing else may keep a
``Use`` alive; groups know it by number. A graph may die on any thread: then the death is only
noted, and given back at the next outermost forward or end of a backward. It never changes what is
communicated; see [Note: shared facts].

[Note: passed input] A single input is passed as a view of itself, the cheapest node there is. A
module may change it in place, as it may without us: then autograd gives view and input new nodes,
in which the module's parameters may have a part. So the input is watched as the outputs are, and as
nothing tells any more when backward is past the module, the end of backward ends the use. Several
inputs share one node of our own, which says once that all were reached; torch refuses to change
them in place. What requires no gradient is passed as it is; if it does afterwards, it is watched,
too.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fullshard.sharding.base.compat import (
    add_tensor_hook,
    node_made_since,
    sequence_of,
    version_of,
)
from fullshard.sharding.base.tensors import map_tensors, tensors_in
from fullshard.sharding.hooks.transforms import watch_gradients

if TYPE_CHECKING:
    from fullshard.sharding.groups.param_group import FSDPParamGroup
    from fullshard.sharding.hooks.module_state import ModuleState

__all__ = ["Passed", "Use", "attach_post_backward", "attach_pre_backward"]

_numbers = itertools.count(1)


class Use:
    """A forward that a backward may follow.

    Attributes:
        number: unique in this process; the owner of its leases.
        position: its place in the post-forward order, from which backward prefetches.
        calls: module calls that belong to it: one per module of the list that ran.
        reached: those whose inputs backward has reached. A call without an input that requires a
            gradient is never reached, so the end of backward ends its use.
        first_node: the number of the first autograd node of its latest call.
        recompute: whether it runs inside a backward.
        in_backward: whether a backward reached its outputs.
        done: whether its backward ended.
    """

    def __init__(self, state: ModuleState, *, recompute: bool) -> None:
        """Declares a forward of ``state`` outstanding; a recomputation is none of its own."""
        self.number = next(_numbers)
        self.state = state
        self.groups: tuple[FSDPParamGroup, ...] = tuple(state.groups)
        self.position = -1
        self.calls = 0
        self.reached = 0
        self.first_node = 0
        self.recompute = recompute
        self.in_backward = False
        self.done = False
        self._thread = threading.get_ident()
        for group in self.groups:
            group.add_use(self)

    def rerun(self) -> None:
        """Begins anew: its graph was retained and is run once more.

        It counts as outstanding no longer, so the end of that backward reduces its groups.
        """
        self.done = False
        self.reached = 0

    def close(self) -> None:
        """Counts no longer: its backward ended."""
        self.done = True
        self.in_backward = False

    def __del__(self) -> None:
        """Gives back what the forward held, if its graph died without a backward."""
        if getattr(self, "done", True):
            return
        for group in self.groups:
            group.dead.append(self.number)
        if self.state.context.quiet and self._thread == threading.get_ident():
            for group in self.groups:
                group.bury()


class Passed:
    """What a module was given and may change in place; see [Note: passed input]."""

    __slots__ = ("_others", "_version", "_view")

    def __init__(self, view: torch.Tensor | None, others: Sequence[torch.Tensor]) -> None:
        """Looks at them before the module runs.

        Args:
            view: the only input that requires a gradient; None: there are none, or several.
            others: inputs that require none.
        """
        self._view = view
        self._others = others
        self._version = 0 if view is None else version_of(view)

    def changed(self) -> list[torch.Tensor]:
        """Returns those through which a backward may come now, as they were changed."""
        found = [tensor for tensor in self._others if tensor.requires_grad]
        if self._view is not None and self.has_new_node():
            found.append(self._view)
        return found

    def has_new_node(self) -> bool:
        """Tells whether the node whose backward ends the use is lost."""
        return self._view is not None and version_of(self._view) != self._version


class _PostBackward(torch.autograd.Function):
    """The identity before a module's inputs, whose backward is the module's post-backward."""

    @staticmethod
    def forward(ctx: Any, use: Use, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.use = use
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *(_past_inputs(ctx.use, grads) or grads))


def _past_inputs(
    use: Use, grads: Sequence[torch.Tensor | None], *_: object
) -> tuple[torch.Tensor | None, ...] | None:
    """Ends the backward of ``use``; returns the inputs' gradients if they may have a backward."""
    use.state.post_backward(use)
    return watch_gradients(use, grads) if torch.is_grad_enabled() else None


def attach_post_backward(
    use: Use, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Passed]:
    """Returns the inputs, passed through a node whose backward ends ``use``, and what they are.

    Inputs of which none requires a gradient come back as they are: then the end of backward ends
    it.
    """
    use.calls += 1
    if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:  # as most are called
        view = _pass_view(use, args[0]) if args[0].requires_grad else None
        if view is not None:
            return (view,), kwargs, Passed(view, ())
    found = tensors_in((args, kwargs))
    others = [tensor for tensor in found if not tensor.requires_grad]
    if len(others) == len(found):
        return args, kwargs, Passed(None, others)
    tensors = [tensor for tensor in found if tensor.requires_grad]
    view = _pass_view(use, tensors[0]) if len(tensors) == 1 else None
    inputs = [view] if view is not None else _pass_all(use, tensors)
    replacement = {id(old): new for old, new in zip(tensors, inputs, strict=True)}
    args, kwargs = map_tensors(lambda t: replacement.get(id(t), t), (args, kwargs))
    return args, kwargs, Passed(view, others)


def _pass_view(use: Use, tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns ``tensor`` as a view whose backward ends ``use``, or None where a view cannot.

    A subclass may return what it likes for a view, and a tensor made in inference mode has views
    without a node.
    """
    if type(tensor) is not torch.Tensor:
        return None
    view = tensor.view_as(tensor)
    node = view.grad_fn
    if node is None:
        return None
    node.register_hook(partial(_past_inputs, use))
    use.first_node = sequence_of(node)
    return view


def _pass_all(use: Use, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    passed: Sequence[torch.Tensor] = _PostBackward.apply(use, *tensors)  # type: ignore[no-untyped-call]  # torch: untyped
    node = passed[0].grad_fn
    assert node is not None, "one requires a gradient, so all get the node"
    use.first_node = sequence_of(node)
    return passed


def attach_pre_backward(use: Use, tensors: Sequence[torch.Tensor]) -> None:
    """Makes the first gradient that reaches one of ``tensors`` begin the backward of ``use``."""
    hook = partial(use.state.pre_backward, use)
    for tensor in tensors:
        add_tensor_hook(tensor, hook)
        node = node_made_since(tensor, use.first_node)
        if node is not None:  # a view, which its user may change in place
            node.register_prehook(hook)

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
them in place.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fullshard.sharding.compat import (
    add_tensor_hook,
    functorch_is_active,
    node_made_since,
    sequence_of,
    version_of,
)
from fullshard.sharding.tensors import map_tensors, tensors_requiring_grad

if TYPE_CHECKING:
    from fullshard.sharding.module_state import ModuleState
    from fullshard.sharding.param_group import FSDPParamGroup

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
    """The view that a module got in place of its only input that requires a gradient."""

    __slots__ = ("_version", "view")

    def __init__(self, view: torch.Tensor) -> None:
        """Remembers ``view`` as it is before the module runs."""
        self.view = view
        self._version = version_of(view)

    def changed(self) -> bool:
        """Tells whether it was changed in place since; see [Note: passed input]."""
        return version_of(self.view) != self._version


class _PostBackward(torch.autograd.Function):
    """The identity before a module's inputs, whose backward is the module's post-backward."""

    @staticmethod
    def forward(ctx: Any, use: Use, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.use = use
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.use.state.post_backward(ctx.use)
        return (None, *grads)


def attach_post_backward(
    use: Use, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Passed | None]:
    """Returns the inputs, passed through a node whose backward ends ``use``, and which is a view.

    Inputs of which none requires a gradient come back as they are: then the end of backward ends
    it.
    """
    use.calls += 1
    if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:  # as most are called
        if not args[0].requires_grad:
            return args, kwargs, None
        passed = _pass_view(use, args[0])
        if passed is not None:
            return (passed.view,), kwargs, passed
    tensors = tensors_requiring_grad((args, kwargs))
    if not tensors:
        return args, kwargs, None
    passed = _pass_view(use, tensors[0]) if len(tensors) == 1 else None
    inputs = [passed.view] if passed is not None else _pass_all(use, tensors)
    replacement = {id(old): new for old, new in zip(tensors, inputs, strict=True)}
    return *map_tensors(lambda t: replacement.get(id(t), t), (args, kwargs)), passed


def _pass_view(use: Use, tensor: torch.Tensor) -> Passed | None:
    """Returns ``tensor`` as a view whose backward ends ``use``, or None where a view cannot.

    A subclass may return what it likes for a view, a tensor made in inference mode has views
    without a node, and inside a functorch transform ``_PostBackward`` says what is wrong.
    """
    if type(tensor) is not torch.Tensor or functorch_is_active():
        return None
    view = tensor.view_as(tensor)
    node = view.grad_fn
    if node is None:
        return None
    node.register_hook(partial(use.state.post_backward, use))
    use.first_node = sequence_of(node)
    return Passed(view)


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

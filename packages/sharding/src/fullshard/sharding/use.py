"""One grad-enabled forward of a module, until its backward ended or its graph died.

Owns the token that autograd holds. [Note: use] The hooks on the module's outputs and the node
before its inputs hold the only strong references to a ``Use``, so when the last of them goes, the
graph went, and what it held is given back. Nothing else may keep a ``Use`` alive; groups know it by
number. A graph may die on any thread: then the death is only noted, and given back at the next
outermost forward or end of a backward. It never changes what is communicated; see
[Note: shared facts].
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from fullshard.sharding.compat import node_made_since, sequence_of
from fullshard.sharding.tensors import map_tensors, tensors_requiring_grad

if TYPE_CHECKING:
    from fullshard.sharding.module_state import ModuleState
    from fullshard.sharding.param_group import FSDPParamGroup

__all__ = ["Use", "attach_post_backward", "attach_pre_backward"]

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
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the inputs, passed through a node whose backward ends ``use``.

    Inputs of which none requires a gradient come back as they are: then the end of backward ends
    it.
    """
    use.calls += 1
    if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:  # as most are called
        if not args[0].requires_grad:
            return args, kwargs
        (passed_one,) = _PostBackward.apply(use, args[0])  # type: ignore[no-untyped-call]  # torch
        use.first_node = sequence_of(passed_one)
        return (passed_one,), kwargs
    tensors = tensors_requiring_grad((args, kwargs))
    if not tensors:
        return args, kwargs
    passed: Sequence[torch.Tensor] = _PostBackward.apply(use, *tensors)  # type: ignore[no-untyped-call]  # torch: untyped
    use.first_node = sequence_of(passed[0])
    replacement = {id(old): new for old, new in zip(tensors, passed, strict=True)}
    return map_tensors(lambda t: replacement.get(id(t), t), (args, kwargs))  # type: ignore[no-any-return]  # same structure


def attach_pre_backward(use: Use, tensors: Sequence[torch.Tensor]) -> None:
    """Makes the first gradient that reaches one of ``tensors`` begin the backward of ``use``."""

    def hook(grads: object) -> None:
        use.state.pre_backward(use)

    for tensor in tensors:
        tensor.register_hook(hook)
        node = node_made_since(tensor, use.first_node)
        if node is not None:  # a view, which its user may change in place
            node.register_prehook(hook)

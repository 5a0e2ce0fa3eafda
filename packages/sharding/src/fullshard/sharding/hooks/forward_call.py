"""One call of a sharded module's forward, and the autograd nodes that announce its backward.

Owns what pre-forward notes for post-forward, and the nodes around a module's inputs and outputs.
[Note: passed input] A single input is passed as a view of itself, the cheapest node there is. A
module may change it in place, as it may without us: then autograd gives view and input new nodes,
in which the module's parameters may have a part. So the input is watched as the outputs are, and as
nothing tells any more when backward is past the module, the end of backward ends the pass. Several
inputs share one node of our own, which says once that all were reached; torch refuses to change
them in place. What requires no gradient is passed as it is; if it does afterwards, it is watched,
too. torch's ``fully_shard`` passes all inputs through a node of its own, and so forbids the change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from fullshard.sharding.base.compat import (
    add_tensor_hook,
    node_made_since,
    sequence_of,
    version_of,
)
from fullshard.sharding.base.forward_pass import ForwardPass
from fullshard.sharding.base.tensors import map_tensors, tensors_in
from fullshard.sharding.groups.param_group import FSDPParamGroup

__all__ = ["BackwardHook", "Call", "attach_post_backward", "attach_pre_backward"]

BackwardHook: TypeAlias = Callable[..., Any]
"""What backward calls, with whatever autograd hands a hook; it knows its forward pass."""


@dataclass(slots=True)
class Call:
    """One call of a module's forward.

    Attributes:
        recompute: whether it runs inside a backward.
        leased: the groups for which it holds a FORWARD lease.
        entered: whether it counts in the root's forward.
        forward_pass: the forward that a backward may follow; absent where gradients are off.
        in_transform: whether it runs inside a transform; see [Note: transforms].
        view: its only input that requires a gradient, as it was passed, if there is just one.
        version: how often that was changed when it was passed.
        others: inputs that required no gradient when they were passed.
    """

    recompute: bool
    leased: list[FSDPParamGroup] = field(default_factory=list)
    entered: bool = False
    forward_pass: ForwardPass | None = None
    in_transform: bool = False
    view: torch.Tensor | None = None
    version: int = 0
    others: Sequence[torch.Tensor] = ()

    def watched(self, output: Any) -> list[torch.Tensor]:
        """Returns the tensors that a backward may come through to what the forward did."""
        if self.forward_pass is None:
            return []
        if type(output) is torch.Tensor:  # as most return
            tensors = [output] if output.requires_grad else []
        else:
            tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        # an error in a change in place leaves the input in a state that torch itself cannot read
        if output is None and sys.exception() is not None:
            return tensors
        for tensor in self.others:
            if tensor.requires_grad:
                tensors.append(tensor)
        if self.view is not None and version_of(self.view) != self.version:
            self.forward_pass.calls += 1  # more than are ever reached: its node is lost
            tensors.append(self.view)
        return tensors


class _PostBackward(torch.autograd.Function):
    """The identity before a module's inputs, whose backward is the module's post-backward."""

    @staticmethod
    def forward(ctx: Any, hook: BackwardHook, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.hook = hook
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *(ctx.hook(grads) or grads))


def attach_post_backward(
    call: Call, hook: BackwardHook, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the inputs, passed through a node whose backward calls ``hook`` with the gradients.

    Inputs of which none requires a gradient come back as they are: then the end of backward ends
    the pass.
    """
    assert call.forward_pass is not None, "gradients are on"
    call.forward_pass.calls += 1
    if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:  # as most are called
        if not args[0].requires_grad:
            call.others = args
            return args, kwargs
        if _pass_view(call, hook, args[0]):
            return (call.view,), kwargs
    found = tensors_in((args, kwargs))
    call.others = [tensor for tensor in found if not tensor.requires_grad]
    tensors = [tensor for tensor in found if tensor.requires_grad]
    if not tensors:
        return args, kwargs
    if len(tensors) == 1 and _pass_view(call, hook, tensors[0]):
        inputs: Sequence[torch.Tensor | None] = [call.view]
    else:
        inputs = _pass_all(call.forward_pass, hook, tensors)
    replacement: dict[int, Any] = {id(old): new for old, new in zip(tensors, inputs, strict=True)}
    args, kwargs = map_tensors(lambda t: replacement.get(id(t), t), (args, kwargs))
    return args, kwargs


def _pass_view(call: Call, hook: BackwardHook, tensor: torch.Tensor) -> bool:
    """Makes a view of ``tensor`` whose backward calls ``hook``; tells whether it could.

    A subclass may return what it likes for a view, and a tensor made in inference mode has views
    without a node.
    """
    if type(tensor) is not torch.Tensor:
        return False
    view = tensor.view_as(tensor)
    node = view.grad_fn
    if node is None:
        return False
    node.register_hook(hook)
    assert call.forward_pass is not None, "gradients are on"
    call.forward_pass.first_node = sequence_of(node)
    call.view, call.version = view, version_of(view)
    return True


def _pass_all(
    forward_pass: ForwardPass, hook: BackwardHook, tensors: list[torch.Tensor]
) -> Sequence[torch.Tensor]:
    passed: Sequence[torch.Tensor] = _PostBackward.apply(hook, *tensors)  # type: ignore[no-untyped-call]  # torch: untyped
    node = passed[0].grad_fn
    assert node is not None, "one requires a gradient, so all get the node"
    forward_pass.first_node = sequence_of(node)
    return passed


def attach_pre_backward(
    forward_pass: ForwardPass, hook: BackwardHook, tensors: Sequence[torch.Tensor]
) -> None:
    """Makes the first gradient that reaches one of ``tensors`` call ``hook``."""
    for tensor in tensors:
        add_tensor_hook(tensor, hook)
        node = node_made_since(tensor, forward_pass.first_node)
        if node is not None:  # a view, which its user may change in place
            node.register_prehook(hook)

"""Other tensors in the place of a call's input tensors, while the module's forward runs.

Owns ``StandIns``. [Note: stand-ins] A module gets the objects that it would get unsharded. So no
container is rebuilt, and no tensor is replaced by another object. The two Python objects exchange
their C++ tensors: the input keeps its identity and its attributes, and is a cast of itself, or a
view with an autograd node of ours. After forward both take their own tensors back. What forward
wrote into a container, or set as an attribute, is where the caller expects it. Checkpointing keeps
inputs for a recomputation, so inputs that were cast are cast again until the backward ends.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from fullshard.sharding.base.compat import (
    current_graph_task,
    forget_hooks,
    hooks_on_gradient,
    swap_impl,
    version_of,
)
from fullshard.sharding.base.tensors import map_tensors, tensors_in

__all__ = ["StandIns"]

_STATELESS = (torch.Tensor, nn.Parameter)  # a subclass keeps a part of its state in attributes
_holders: dict[int, list[int]] = {}  # by the id of an input: the thread whose call exchanged it


class _Exchanged(NamedTuple):
    tensor: torch.Tensor
    other: torch.Tensor
    version: int  # of ``other``, when it was exchanged
    has_hooks: bool  # of the user, on ``tensor``


class StandIns:
    """The inputs of one call that are exchanged, and the tensors exchanged for them."""

    __slots__ = ("_exchanged", "_held")

    def __init__(self) -> None:
        """Exchange nothing yet."""
        self._exchanged: list[_Exchanged] = []
        self._held: list[int] = []

    def put(self, inputs: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> None:
        """Exchange each input for another tensor, or for itself, which changes nothing.

        Raises:
            RuntimeError: if a call in another thread has exchanged an input, or ``retain_grad()``
                was called of one that is cast.
        """
        for tensor, other in zip(inputs, others, strict=True):
            if other is tensor:
                continue
            if tensor.retains_grad:  # torch binds it to the C++ tensor
                if not _are_alike(tensor, other):
                    raise _bound(tensor, other)
                continue  # without a stand-in, the end of backward ends the call
            self._hold(tensor)
            has_hooks = hooks_on_gradient(tensor) is not None
            self._exchanged.append(_Exchanged(tensor, other, _version(other), has_hooks))
            _exchange(tensor, other)

    def _hold(self, tensor: torch.Tensor) -> None:
        mine = [threading.get_ident()]
        holder = _holders.setdefault(id(tensor), mine)
        if holder is mine:
            self._held.append(id(tensor))
        elif holder != mine and current_graph_task() == -1:  # a recomputation has its own thread
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} is an input of sharded modules that two "
                "threads call at one time; give each thread its own tensor, such as "
                "tensor.view_as(tensor)"
            )

    def take_back(self) -> None:
        """Give the inputs their own tensors again.

        An input of which forward called ``retain_grad()`` stays a view of itself.

        Raises:
            RuntimeError: if such an input was cast.
        """
        bound = [each for each in self._exchanged if each.tensor.retains_grad]
        if bound:
            self._exchanged = [each for each in self._exchanged if not each.tensor.retains_grad]
        for tensor, other, _, has_hooks in reversed(self._exchanged):
            _exchange(tensor, other)
            if not has_hooks and hooks_on_gradient(tensor) is not None:
                forget_hooks(tensor)  # forward registered them: the stand-in has them
        for number in self._held:
            _holders.pop(number, None)
        self._held.clear()
        for tensor, other, *_ in bound:
            if not _are_alike(tensor, other):
                raise _bound(other, tensor)

    def changed(self) -> list[torch.Tensor]:
        """Return the stand-ins that forward changed in place."""
        return [each.other for each in self._exchanged if _version(each.other) != each.version]

    def cast(self) -> list[weakref.ref[torch.Tensor]]:
        """Return the inputs of which the stand-ins have another dtype or device."""
        pairs = ((each.tensor, each.other) for each in self._exchanged)
        return [weakref.ref(tensor) for tensor, other in pairs if not _are_alike(tensor, other)]

    def returned(self, output: Any) -> Any:
        """Return ``output`` with stand-ins for inputs in it, where that is necessary.

        A stand-in of another dtype or on another device is what the module computed with. If no
        other tensor in ``output`` requires a gradient, only the node of a stand-in shows that
        backward reached the module.
        """
        if not self._exchanged:
            return output
        found = [output] if type(output) is torch.Tensor else tensors_in(output)
        inputs = {id(each.tensor) for each in self._exchanged}
        if inputs.isdisjoint(map(id, found)):
            return output
        alone = not any(each.requires_grad for each in found if id(each) not in inputs)
        stand_ins: dict[int, torch.Tensor] = {}
        for tensor, other, version, _ in self._exchanged:
            if not _are_alike(tensor, other) or (alone and _version(other) == version):
                # hooks on an output hold the nodes before the inputs, so it has a node of its own
                stand_ins[id(tensor)] = other.view_as(other) if other.requires_grad else other
        return map_tensors(lambda tensor: stand_ins.get(id(tensor), tensor), output)


def _are_alike(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether a stand-in is the input itself in another view, and no cast or copy of it."""
    return (tensor.dtype, tensor.device) == (other.dtype, other.device)


def _bound(tensor: torch.Tensor, other: torch.Tensor) -> RuntimeError:
    return RuntimeError(
        f"retain_grad() was called on an input of shape {tuple(tensor.shape)}, which a sharded "
        f"module casts from {tensor.dtype} on {tensor.device} to {other.dtype} on {other.device}; "
        "pass tensor.view_as(tensor), so that the tensor with the gradient is no input"
    )


def _version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; tensors of inference mode do not count."""
    return 0 if tensor.is_inference() else version_of(tensor)


def _exchange(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange the C++ tensors of two objects; both have what a user set as an attribute.

    Checkpointing may give a recomputation the stand-in, which autograd saved.
    """
    if type(tensor) in _STATELESS and type(other) in _STATELESS:
        other.__dict__ = tensor.__dict__
    else:
        _exchange_state(tensor, other)
    swap_impl(tensor, other)


def _exchange_state(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange what subclasses of tensors keep in their class, slots and attributes."""
    own, others = vars(tensor), vars(other)
    if type(tensor) is not type(other):
        tensor.__class__, other.__class__ = type(other), type(tensor)
    tensor.__dict__, other.__dict__ = {**own, **others}, {**others, **own}
    slots = [slot for kind in type(tensor).__mro__ for slot in vars(kind).get("__slots__", ())]
    for slot in slots:
        if hasattr(tensor, slot) and hasattr(other, slot):
            value = getattr(tensor, slot)
            setattr(tensor, slot, getattr(other, slot))
            setattr(other, slot, value)

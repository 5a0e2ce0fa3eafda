"""Other tensors in the place of a call's input tensors, while the module's forward runs.

Owns ``StandIns``. [Note: stand-ins] A module gets the objects that it would get unsharded.
Therefore containers stay the same objects, and so do tensors. The two Python objects exchange their
C++ tensors: the input keeps its identity and its attributes, and is a cast of itself, or a view
with an autograd node of ours. After forward both take their own tensors back. The caller finds what
forward wrote into a container, or set as an attribute. Checkpointing keeps inputs for a
recomputation, so inputs that were cast are cast again until the backward ends. In a recomputation
the arguments hold the stand-ins themselves: checkpointing keeps the very objects that autograd
saves there, after the module has ended.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from fullshard.comm.spi import is_profiled
from fullshard.sharding.base.compat import (
    current_graph_task,
    forget_hooks,
    hooks_on_gradient,
    swap_impl,
    untraced,
    version_of,
)
from fullshard.sharding.base.tensors import (
    STATELESS,
    map_tensors,
    replace_in,
    tensors_in,
    with_attributes_of,
)

__all__ = ["Args", "Inputs", "Kwargs", "StandIns"]

Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
Inputs: TypeAlias = tuple[Args, Kwargs]
"""The arguments of a module's forward."""

_holders: dict[int, list[int]] = {}  # by the id of an input: the thread whose call exchanged it


class _Pair(NamedTuple):
    tensor: torch.Tensor
    other: torch.Tensor
    version: int  # of ``other``, when forward began
    has_hooks: bool  # of the user, on ``tensor``
    exchanged: bool  # else the arguments hold ``other`` itself


@untraced
class StandIns:
    """The inputs of one call that have a stand-in."""

    __slots__ = ("_arguments", "_exchanges", "_held", "_others", "_pairs")

    def __init__(self, *, exchanges: bool = True) -> None:
        """Exchange nothing yet. ``exchanges``: whether inputs are exchanged, or replaced."""
        self._exchanges = exchanges
        self._pairs: list[_Pair] = []
        self._held: list[int] = []
        self._others: dict[int, torch.Tensor] = {}  # by the id of an input that is not exchanged
        self._arguments: Sequence[Any] = ()  # that hold such stand-ins

    def put(self, inputs: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> None:
        """Exchange each input for another tensor, or for itself, which changes nothing.

        ``applied`` replaces what is not exchanged: torch binds a C++ tensor to its object for
        ``retain_grad()``, and for a profiler.

        Raises:
            RuntimeError: if a call in another thread has exchanged an input.
        """
        for tensor, other in zip(inputs, others, strict=True):
            if other is tensor:
                continue
            has_hooks, version = hooks_on_gradient(tensor) is not None, _version(other)
            exchanged = self._exchanges and not is_profiled()
            if exchanged:
                self._hold(tensor)
                try:
                    _exchange(tensor, other)
                except RuntimeError:
                    exchanged = False
            if not exchanged:
                with_attributes_of(tensor, other)
                self._others[id(tensor)] = other
            self._pairs.append(_Pair(tensor, other, version, has_hooks, exchanged))

    def through(
        self,
        fn: Callable[[list[torch.Tensor]], Iterable[torch.Tensor]],
        args: Args,
        kwargs: Kwargs,
    ) -> Inputs:
        """Put what ``fn`` makes of the tensors in the arguments, and return the arguments."""
        inputs = tensors_in((args, kwargs))
        self.put(inputs, fn(inputs))
        return self.applied(args, kwargs)

    def applied(self, args: Args, kwargs: Kwargs) -> Inputs:
        """Return the arguments with the stand-ins of inputs that are not exchanged.

        Containers among them are changed in place, until ``take_back``.
        """
        if not self._others:
            return args, kwargs
        args = tuple([replace_in(value, self._others) for value in args])
        kwargs = {name: replace_in(value, self._others) for name, value in kwargs.items()}
        self._others, self._arguments = {}, (*args, *kwargs.values())
        return args, kwargs

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
        bound, pairs = list[_Pair](), list[_Pair]()
        for pair in self._pairs:
            (bound if pair.exchanged and pair.tensor.retains_grad else pairs).append(pair)
        self._pairs = pairs
        own: dict[int, torch.Tensor] = {}
        for pair in self._pairs:
            if not pair.exchanged:
                own[id(pair.other)] = own.get(id(pair.tensor), pair.tensor)
        for value in self._arguments:
            replace_in(value, own)
        self._arguments = ()
        for pair in reversed(self._pairs):
            if pair.exchanged:
                _exchange(pair.tensor, pair.other)
                if not pair.has_hooks and hooks_on_gradient(pair.tensor) is not None:
                    forget_hooks(pair.tensor)  # forward registered them: the stand-in has them
            elif pair.other.retains_grad:
                pair.tensor.retain_grad()
        for number in self._held:
            _holders.pop(number, None)
        self._held.clear()
        for pair in bound:
            if not _are_alike(pair.tensor, pair.other):
                raise _bound(pair.other, pair.tensor)

    def changed(self) -> list[torch.Tensor]:
        """Return the stand-ins that forward changed in place."""
        return [pair.other for pair in self._pairs if _version(pair.other) != pair.version]

    def inputs(self) -> set[int]:
        """Return the ids of the inputs that have a stand-in."""
        return {id(pair.tensor) for pair in self._pairs}

    def cast(self) -> list[weakref.ref[torch.Tensor]]:
        """Return the inputs of which the stand-ins have another dtype or device."""
        return [weakref.ref(p.tensor) for p in self._pairs if not _are_alike(p.tensor, p.other)]

    def returned(self, output: Any) -> Any:
        """Return ``output`` with stand-ins for inputs in it, where that is necessary.

        A stand-in of another dtype or on another device is what the module computed with. If no
        other tensor in ``output`` requires a gradient, only the node of a stand-in shows that
        backward reached the module.
        """
        if not self._pairs:
            return output
        found = [output] if type(output) is torch.Tensor else tensors_in(output)
        inputs = self.inputs() | {id(pair.other) for pair in self._pairs}
        if inputs.isdisjoint(map(id, found)):
            return output
        alone = not any(each.requires_grad for each in found if id(each) not in inputs)
        others: dict[int, torch.Tensor] = {}
        for tensor, other, version, *_ in self._pairs:
            # hooks on an output hold the nodes before the inputs, so it has a node of its own
            shown = other.view_as(other) if other.requires_grad else other
            others[id(other)] = with_attributes_of(tensor, shown)
            if not _are_alike(tensor, other) or (alone and _version(other) == version):
                others[id(tensor)] = shown
        return map_tensors(lambda tensor: others.get(id(tensor), tensor), output)


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
    swap_impl(tensor, other)
    if type(tensor) in STATELESS and type(other) in STATELESS:
        other.__dict__ = tensor.__dict__
    else:
        _exchange_state(tensor, other)


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

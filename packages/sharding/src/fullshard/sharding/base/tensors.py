"""Tensors inside nested containers: find them, replace them.

Owns one walk over tuples, lists, dicts, sets, named tuples, dataclasses, and what is registered
with torch's pytree; anything else is a leaf that is passed through untouched.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from fullshard.sharding.base.compat import registered_node

__all__ = [
    "PLAIN",
    "STATELESS",
    "is_plain",
    "map_tensors",
    "replace_in",
    "tensors_in",
    "with_attributes_of",
]

PLAIN: set[type] = {torch.Tensor, nn.Parameter}
"""The kinds of tensors that are their memory and nothing else; a simulator adds its own."""

STATELESS = (torch.Tensor, nn.Parameter)
"""The kinds of tensors whose attributes are all a user's; a subclass may keep its state there."""


def is_plain(tensor: object) -> bool:
    """Whether a tensor's memory may stand for it; of other subclasses only they know."""
    return type(tensor) in PLAIN


def with_attributes_of(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return ``other`` with what a user set as attributes of ``tensor``, which it replaces."""
    if type(tensor) in STATELESS and type(other) in STATELESS:
        other.__dict__ = tensor.__dict__
    else:
        other.__dict__ = {**vars(tensor), **vars(other)}
    return other


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return ``value`` with ``fn`` applied to every tensor in it.

    A container in which ``fn`` changed nothing is returned as the same object.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    node = _container(value)
    if node is None:
        return value
    children, rebuild = node
    items = [map_tensors(fn, item) for item in children]
    if all(new is old for new, old in zip(items, children, strict=True)):
        return value
    return rebuild(items)


def _container(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Return what is in a container, and how to make one like it of others; None for a leaf."""
    if isinstance(value, dict):
        return list(value.values()), partial(_rebuilt_dict, value)
    if isinstance(value, PackedSequence):  # torch wants the second on the CPU
        return list(value), lambda items: type(value)(items[0], value.batch_sizes, *items[2:])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(value), lambda items: type(value)(*items)
    if isinstance(value, (tuple, list, set, frozenset)):
        return list(value), type(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return [getattr(value, name) for name in names], partial(_rebuilt_dataclass, value, names)
    return registered_node(value)


def _rebuilt_dict(original: dict[Any, Any], items: list[Any]) -> Any:
    mapped = dict(zip(original, items, strict=True))
    if type(original) is dict:
        return mapped
    rebuilt = copy.copy(original)  # keeps the class, a defaultdict's factory, the order
    for key, item in mapped.items():
        rebuilt[key] = item
    return rebuilt


def _rebuilt_dataclass(original: Any, names: list[str], items: list[Any]) -> Any:
    if all(field.init for field in dataclasses.fields(original)):
        return dataclasses.replace(original, **dict(zip(names, items, strict=True)))
    rebuilt = copy.copy(original)
    for name, item in zip(names, items, strict=True):
        object.__setattr__(rebuilt, name, item)
    return rebuilt


def replace_in(value: Any, others: dict[int, torch.Tensor]) -> Any:
    """Return ``value`` with other tensors for those whose ids are keys of ``others``.

    A container that can be changed is changed in place. A tuple or a frozenset is made again, and
    so is a registered container that does not keep its tensors in attributes.
    """
    if isinstance(value, torch.Tensor):
        return others.get(id(value), value)
    node = _container(value)
    if node is None or not any(id(each) in others for each in tensors_in(value)):
        return value
    if isinstance(value, dict):
        for key, item in list(value.items()):
            if (new := replace_in(item, others)) is not item:
                value[key] = new
    elif isinstance(value, (list, deque)):
        for index, item in enumerate(value):
            if (new := replace_in(item, others)) is not item:
                value[index] = new
    elif isinstance(value, set):
        items = [replace_in(item, others) for item in value]
        value.clear()
        value.update(items)
    elif not isinstance(value, (tuple, frozenset)):
        for name, item in list(getattr(value, "__dict__", {}).items()):
            if (new := replace_in(item, others)) is not item:
                object.__setattr__(value, name, new)
    children, rebuild = _container(value) or node
    items = [replace_in(item, others) for item in children]
    return value if all(map(is_, items, children)) else rebuild(items)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return every tensor in ``value``, each once, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: dict[int, torch.Tensor] = {}
    map_tensors(lambda tensor: found.setdefault(id(tensor), tensor), value)
    return list(found.values())

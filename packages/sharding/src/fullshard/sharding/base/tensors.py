"""Tensors inside nested containers: find them, replace them.

Owns one walk over tuples, lists, dicts, sets, named tuples, dataclasses, and what is registered
with torch's pytree; anything else is a leaf that is passed through untouched.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from fullshard.sharding.base.compat import registered_node

__all__ = ["map_tensors", "tensors_in"]


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Returns ``value`` with ``fn`` applied to every tensor in it.

    A container in which ``fn`` changed nothing is returned as the same object.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, dict):
        mapped = {key: map_tensors(fn, item) for key, item in value.items()}
        if all(mapped[key] is item for key, item in value.items()):
            return value
        return _rebuild_dict(value, mapped)
    if isinstance(value, (tuple, list)):
        items = [map_tensors(fn, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if isinstance(value, PackedSequence):
            items[1] = value.batch_sizes  # torch wants it on the CPU
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items)
    if isinstance(value, (set, frozenset)):
        members = [(item, map_tensors(fn, item)) for item in value]
        if all(new is old for old, new in members):
            return value
        return type(value)(new for _, new in members)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(fn, value)
    return _map_registered(fn, value)


def _map_registered(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    node = registered_node(value)
    if node is None:
        return value
    children, rebuild = node
    items = [map_tensors(fn, item) for item in children]
    if all(new is old for new, old in zip(items, children, strict=True)):
        return value
    return rebuild(items)


def _rebuild_dict(original: dict[Any, Any], mapped: dict[Any, Any]) -> Any:
    if type(original) is dict:
        return mapped
    rebuilt = copy.copy(original)  # keeps the class, a defaultdict's factory, the order
    for key, item in mapped.items():
        rebuilt[key] = item
    return rebuilt


def _map_dataclass(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    changed = {}
    for field in dataclasses.fields(value):
        old = getattr(value, field.name)
        new = map_tensors(fn, old)
        if new is not old:
            changed[field.name] = new
    if not changed:
        return value
    settable = {field.name for field in dataclasses.fields(value) if field.init}
    if settable >= changed.keys() and all(f.init for f in dataclasses.fields(value)):
        return dataclasses.replace(value, **changed)
    rebuilt = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(rebuilt, name, new)
    return rebuilt


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns every tensor in ``value``, each once, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: dict[int, torch.Tensor] = {}

    def visit(tensor: torch.Tensor) -> torch.Tensor:
        found.setdefault(id(tensor), tensor)
        return tensor

    map_tensors(visit, value)
    return list(found.values())

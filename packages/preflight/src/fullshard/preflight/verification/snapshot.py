"""The state that a forward changes in a model: buffers, and attributes of modules.

The reference runs one forward for each rank's batch on one model. ``in_turn`` lets each of these
begin with the same state, so that the state moves once per step, as it does on each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from fullshard.preflight.verification.names import clean

__all__ = ["Snapshot", "held_by", "in_turn"]

_T = TypeVar("_T")

_PLAIN = (bool, int, float, str, type(None), torch.Tensor)


class Snapshot:
    """A copy of the buffers, and of the numbers and tensors that modules have as attributes."""

    def __init__(self, model: nn.Module) -> None:
        """Copy what ``model`` has now."""
        self._modules = [
            (module, _attributes(module), dict(module._buffers)) for module in model.modules()
        ]
        tensors = [
            value
            for _, attributes, buffers in self._modules
            for value in (*attributes.values(), *buffers.values())
            if isinstance(value, torch.Tensor) and not value.requires_grad
        ]
        self._values = [(tensor, tensor.clone()) for tensor in tensors]

    def restore(self) -> None:
        """Give the model what it had."""
        for module, attributes, buffers in self._modules:
            for key in _attributes(module).keys() - attributes.keys():
                del vars(module)[key]
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for tensor, value in self._values:
                tensor.copy_(value)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if isinstance(value, _PLAIN)}


def held_by(model: nn.Module) -> dict[str, Any]:
    """Return the buffers and these attributes by full name, tensors as detached copies."""
    return {
        clean(f"{path}.{key}" if path else key): _copied(value)
        for path, module in model.named_modules()
        for key, value in (*_attributes(module).items(), *module._buffers.items())
    }


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def in_turn(model: nn.Module | None, ranks: Iterable[_T]) -> Iterator[_T]:
    """Yield the entries of ``ranks``, each with the state that ``model`` has before the first.

    Afterwards ``model`` has the state that the first left. None: there is no model to restore.
    """
    start = None if model is None else Snapshot(model)
    end = None
    for each in ranks:
        if start is not None:
            start.restore()
        yield each
        if end is None and model is not None:
            end = Snapshot(model)
    if end is not None:
        end.restore()

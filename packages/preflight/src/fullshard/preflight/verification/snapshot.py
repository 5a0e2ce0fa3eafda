"""The state that a step changes in a model: buffers, attributes of modules, what optimizers change.

The reference runs each rank's batch on one model. ``in_turn`` lets each batch begin with the same
state, so that the state moves once per step, as it does on each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from fullshard.preflight.verification.names import clean

__all__ = ["Snapshot", "held_by", "in_turn"]

_T = TypeVar("_T")

_PLAIN = (bool, int, float, str, type(None), torch.Tensor)


class Snapshot:
    """A copy of the buffers, and of the numbers and tensors that modules have as attributes.

    Args:
        model: that has them now.
        optimizers: if any, the copy has the parameters, their gradients and the optimizers, too.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        self._modules = [
            (module, _attributes(module), dict(module._buffers)) for module in model.modules()
        ]
        tensors = [
            value
            for _, attributes, buffers in self._modules
            for value in (*attributes.values(), *buffers.values())
            if isinstance(value, torch.Tensor) and not value.requires_grad
        ]
        params = list(model.parameters()) if optimizers else []
        self._gradients = [(param, param.grad) for param in params]
        self._states = [
            (each, {param: dict(state) for param, state in each.state.items()})
            for each in optimizers
        ]
        self._groups = [
            (group, {key: value for key, value in group.items() if key != "params"})
            for each in optimizers
            for group in each.param_groups
        ]
        tensors += [*params, *(grad for _, grad in self._gradients if grad is not None)]
        dicts = [kept for _, states in self._states for kept in states.values()]
        dicts += [settings for _, settings in self._groups]
        tensors += [each for kept in dicts for each in kept.values() if _is_tensor(each)]
        self._values = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def restore(self) -> None:
        """Give the model what it had."""
        for module, attributes, buffers in self._modules:
            for key in _attributes(module).keys() - attributes.keys():
                del vars(module)[key]
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
        for param, grad in self._gradients:
            param.grad = grad
        for optimizer, states in self._states:
            optimizer.state.clear()
            optimizer.state.update({param: dict(state) for param, state in states.items()})
        for group, settings in self._groups:
            group.update(settings)
        for tensor, value in self._values:
            tensor.data.copy_(value)  # autograd sees no change: graphs of this state stay valid


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


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


def in_turn(
    model: nn.Module | None,
    ranks: Iterable[_T],
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> Iterator[_T]:
    """Yield the entries of ``ranks``, each with the state that ``model`` has before the first.

    Afterwards ``model`` has the buffers and attributes that the first left.

    Args:
        model: None: there is none to restore.
        ranks: one for each rank's batch.
        optimizers: to restore as well, with the parameters and gradients; see ``Snapshot``.
    """
    start = None if model is None else Snapshot(model, optimizers)
    end = None
    for each in ranks:
        if start is not None:
            start.restore()
        yield each
        if end is None and model is not None:
            end = Snapshot(model)
    if end is not None:
        end.restore()

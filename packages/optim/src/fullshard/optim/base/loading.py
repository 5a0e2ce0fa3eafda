"""Check before loading that a state dict belongs to this optimizer and is cut like it.

Owns the check, so that nothing is half loaded. ``fullshard.checkpoint`` and
``torch.distributed.checkpoint`` reshard a state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from fullshard.optim.base.stepped import described, label_of

__all__ = ["Shapes", "require_own_state"]

Shapes = Mapping[str, Sequence[int] | None]
"""The keys of a parameter's state, and the whole shape of each tensor; None: a number."""


def require_own_state(
    optimizer: Optimizer,
    state_dict: Mapping[str, Any],
    shapes_of: Callable[[Mapping[str, Any], torch.Tensor], Shapes],
) -> None:
    """Return if ``optimizer`` may load ``state_dict``.

    Args:
        optimizer: it has its parameters.
        state_dict: as its ``state_dict()`` gives it.
        shapes_of: which keys the state of a parameter of a group must have, and their shapes.

    Raises:
        ValueError: if not, naming the first parameter whose state does not fit.
    """
    saved = state_dict["param_groups"]
    if len(saved) != len(optimizer.param_groups):
        return  # torch says it
    name = type(optimizer).__name__
    for group, own in zip(saved, optimizer.param_groups, strict=True):
        algorithms = [each.get("algorithm") for each in (group, own)]
        if None not in algorithms and algorithms[0] != algorithms[1]:
            raise ValueError(
                f"a group was saved with algorithm={algorithms[0]!r}, and {name} steps it with "
                f"{algorithms[1]!r}; build the optimizer with the same groups in the same order"
            )
        for key, param in zip(group["params"], own["params"], strict=False):
            state = state_dict["state"].get(key)
            if state:
                _require_fits(name, param, state, shapes_of(own, param))


def _require_fits(name: str, param: torch.Tensor, state: Mapping[str, Any], shapes: Shapes) -> None:
    if set(state) != set(shapes):
        raise ValueError(
            f"the state of {label_of(param)} has {sorted(state)}, and {name} keeps {sorted(shapes)}"
            ": it is another optimizer's, or of other options; load it into one of the class that "
            "saved it"
        )
    for key, value in state.items():
        shape = shapes[key]
        if shape is None:
            continue
        fits = isinstance(value, torch.Tensor) and tuple(value.shape) == tuple(shape)
        # what has another shape than the parameter, the optimizer cuts itself
        if fits and (tuple(shape) != tuple(param.shape) or _is_cut_alike(value, param)):
            continue
        raise ValueError(
            f"the state {key!r} of {label_of(param)} is {described(value)}, and the parameter is "
            f"{described(param)}; load it with "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict or with "
            "fullshard.checkpoint, which cut it as the parameter is cut now"
        )


def _is_cut_alike(value: torch.Tensor, param: torch.Tensor) -> bool:
    if not isinstance(value, DTensor) or not isinstance(param, DTensor):
        return isinstance(value, DTensor) == isinstance(param, DTensor)
    return value.placements == param.placements and value.device_mesh == param.device_mesh

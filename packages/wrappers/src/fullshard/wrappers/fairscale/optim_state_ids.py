"""Optimizer state that FairScale saved: its numbers for parameters become names.

Owns that one translation. FairScale numbers parameters wrapper by wrapper, the outermost first, and
not as ``parameters()`` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["with_names"]

_MAP, _UNCOLLECTED = "param_id_map", "uncollected_local_ids"  # keys that FairScale alone has


def with_names(state_dict: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return a full optimizer state dict by names; one that FairScale did not save as it is.

    Args:
        state_dict: whole tensors, by number or by name.
        names: those of the parameters, in FairScale's order.

    Raises:
        ValueError: if FairScale saved it of another number of parameters, or without those of some
            wrappers.
    """
    if _MAP not in state_dict:
        return dict(state_dict)
    if len(state_dict[_MAP]) != len(names):
        raise ValueError(
            f"FairScale saved the optimizer state of {len(state_dict[_MAP])} parameters, and the "
            f"model has {len(names)}; load it into a model wrapped as the saved one was"
        )
    if state_dict.get(_UNCOLLECTED):
        raise ValueError(
            "FairScale saved this optimizer state without that of wrappers with "
            "no_broadcast_optim_state=True; put it in, and empty 'uncollected_local_ids'"
        )
    named = {key: value for key, value in state_dict.items() if key not in (_MAP, _UNCOLLECTED)}
    named["state"] = {
        names[number]: {key: _first(value) for key, value in state.items()}
        for number, state in state_dict["state"].items()
    }
    named["param_groups"] = [
        {**group, "params": [names[number] for number in group["params"]]}
        for group in state_dict["param_groups"]
    ]
    return named


def _first(value: Any) -> Any:
    """Return the value; of numbers that each rank had as a tensor, the first."""
    return value[0] if isinstance(value, list) and isinstance(value[0], torch.Tensor) else value

"""Models, and their optimizers, through torch's checkpoints and full state dicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

from fullshard.sharding import full_state_dict, load_full_state_dict
from support.parity.compare import full
from support.surface.ranks import assert_equal_state


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write the weights and the optimizer's state; every rank calls it."""
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


def whole_values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return whole parameters by name, and the state of each as ``name/key``."""
    values = {name: full(value) for name, value in model.state_dict().items()}
    moments: Any = get_optimizer_state_dict(model, optimizer)["state"]
    for name, entry in moments.items():
        values.update({f"{name}/{key}": full(torch.as_tensor(v)) for key, v in entry.items()})
    return values


def assert_full_states_travel(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    """The full state dict is the expected one, and another loads, each rank's own or rank 0's."""
    assert_equal_state(full_state_dict(model, rank0_only=False), expected)
    other = {name: 3 * value + 1 for name, value in expected.items()}
    for from_rank0 in (False, True):
        given = other if not from_rank0 or dist.get_rank() == 0 else {}
        load_full_state_dict(model, given, broadcast_from_rank0=from_rank0)
        assert_equal_state(full_state_dict(model, rank0_only=False), other)
        load_full_state_dict(model, expected)

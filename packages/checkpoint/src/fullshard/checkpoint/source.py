"""The arguments of functions on an optimizer's state, and the ranks that they concern.

Owns one value that travels through saving and loading, and who is first among the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer

from fullshard.checkpoint.agreement import meshes_of
from fullshard.checkpoint.keys import (
    OptimInput,
    OptimLayout,
    ParamNames,
    clean_name,
    layout_of,
)
from fullshard.checkpoint.scatter import Sender
from fullshard.sharding.mesh.mesh_info import device_of_mesh
from fullshard.sharding.optim.rebinding import rebind_optimizer

__all__ = ["OptimSource", "first_rank", "keys_of", "params_of", "sender_of", "with_state"]


@dataclass(frozen=True)
class OptimSource:
    """The arguments that all of these functions share.

    Attributes:
        model: whose parameters are named.
        optim: its optimizer, where there is one.
        optim_input: what that was built with, if given.
        group: the ranks of the model; None: those of its meshes.
    """

    model: nn.Module
    optim: Optimizer | None
    optim_input: OptimInput
    group: dist.ProcessGroup | None

    def layout(self, names: ParamNames) -> OptimLayout:
        """Returns which parameters the optimizer holds, after it let go of replaced ones."""
        if self.optim is not None:
            rebind_optimizer(self.optim)
        return layout_of(names, self.optim, self.optim_input)


def params_of(names: ParamNames) -> dict[str, torch.Tensor]:
    """Returns each parameter of the model by its first name."""
    return {name: param for param, name in names.names.items()}


def with_state(
    named: dict[str, Any], state: dict[str, Any], params: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Returns ``named`` with another state for the parameters; the user's own stays."""
    own = {key: value for key, value in named["state"].items() if key not in params}
    return {**named, "state": {**state, **own}}


def keys_of(layout: OptimLayout, own: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns what the optimizer calls each of its parameters."""
    if own is None:
        return {name: index for index, name in enumerate(layout.order)}
    found = [key for group in own["param_groups"] for key in group["params"]]
    by_clean = {clean_name(key): key for key in found if isinstance(key, str)}
    missing = [name for name in layout.order if name not in by_clean]
    if missing:
        raise ValueError(
            f"is_named_optimizer=True, but the optimizer's own state dict does not name "
            f"{missing[0]}; leave it out for an optimizer whose keys are ids"
        )
    return {name: by_clean[name] for name in layout.order}


def _ranks_of(params: Mapping[str, torch.Tensor]) -> set[int]:
    return {rank for mesh in meshes_of(params) for rank in mesh.mesh.flatten().tolist()}


def first_rank(params: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> int:
    """Returns the global number of rank 0 of ``group``, or of the ranks of the model."""
    if group is not None:
        return dist.get_global_rank(group, 0)
    return min(_ranks_of(params), default=0)


def sender_of(params: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> Sender | None:
    """Returns who scatters to whom; None if there is one rank only."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    meshes = list(meshes_of(params))
    if group is None and len(meshes) == 1 and meshes[0].ndim == 1:
        group = meshes[0].get_group()
    if group is None:
        if meshes and _ranks_of(params) != set(range(dist.get_world_size())):
            raise ValueError(
                "the model is not on all ranks, and its mesh has several axes; pass as group a "
                "process group of its ranks"
            )
        group = dist.group.WORLD
    assert group is not None, "torch.distributed is initialised"
    device = device_of_mesh(meshes[0]) if meshes else torch.device("cpu")
    return Sender(process_group=group, first=dist.get_global_rank(group, 0), device=device)

"""The programs whose races are watched, on the asynchronous device: what they compute there."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from support.card import CARD
from support.device.pace import Pace, paced
from support.races.programs import OPTIONS, PROGRAMS, train

Results = list[torch.Tensor]


@functools.cache
def device_mesh(sizes: int | tuple[int, ...]) -> DeviceMesh:
    """Return a mesh of all ranks over the device, with the names that the programs use."""
    shape = sizes if isinstance(sizes, tuple) else (sizes,)
    names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
    return init_device_mesh(CARD.type, shape, mesh_dim_names=names)


def outcome(name: str, sizes: int | tuple[int, ...], pace: Pace) -> Results:
    """Run a program at a pace; return its losses and this rank's parameters, on the CPU."""
    torch.manual_seed(1)
    mesh, left = device_mesh(sizes), list[Any]()
    with paced(pace):
        if name in OPTIONS:
            result: Any = train(mesh, **OPTIONS[name], at_end=left.append)
        else:
            result = PROGRAMS[name](mesh)
        values = [each for model in left for each in model.parameters()]
        return [torch.as_tensor(each).cpu() for each in result] + [_local(each) for each in values]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().cpu().clone()

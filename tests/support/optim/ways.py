"""Ways to shard a module: each a world of threads, and what a rank does to its copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from fullshard.checkpoint.boxes import box_here
from fullshard.sharding import fully_shard, replicate
from fullshard.sharding.base.compat import local_shard, spec_of

_TENSOR_PARALLEL: dict[str, Placement] = {
    "square": Shard(0),
    "wide": Shard(1),
    "tall": Shard(0),
    "uneven": Shard(1),
    "few": Replicate(),
    "experts": Shard(0),
    "fused": Shard(0),
    "bias": Shard(0),
    "embedding": Shard(0),
}


def _rows(module: nn.Module, size: int) -> None:
    fully_shard(module, mesh=init_device_mesh("cpu", (size,)))


def _columns(module: nn.Module, size: int) -> None:
    def place(param: nn.Parameter) -> Shard:
        return Shard(1 if param.ndim > 1 else 0)

    fully_shard(module, mesh=init_device_mesh("cpu", (size,)), shard_placement_fn=place)


def _hybrid(module: nn.Module, size: int) -> None:
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("copies", "shards"))
    fully_shard(module, mesh=mesh)


def _copies(module: nn.Module, size: int) -> None:
    replicate(module, mesh=init_device_mesh("cpu", (size,)))


def _distribute(module: nn.Module, mesh: DeviceMesh) -> None:
    for name, placement in _TENSOR_PARALLEL.items():
        param = module.get_parameter(name)
        whole = distribute_tensor(param.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(whole))


def _tensor_parallel(module: nn.Module, size: int) -> None:
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    _distribute(module, mesh["tp"])
    fully_shard(module, mesh=mesh["dp"])


def _all_axes(module: nn.Module, size: int) -> None:
    names = ("copies", "shards", "tp")
    mesh = init_device_mesh("cpu", (size // 4, 2, 2), mesh_dim_names=names)
    _distribute(module, mesh["tp"])
    fully_shard(module, mesh=mesh["copies", "shards"])


@dataclass(frozen=True)
class Way:
    """How a module is sharded.

    Attributes:
        world_size: over how many ranks.
        shard: shards a module in place.
    """

    world_size: int
    shard: Callable[[nn.Module, int], None]

    def apply(self, module: nn.Module) -> None:
        """Shard ``module``; every rank calls it."""
        self.shard(module, self.world_size)


WAYS = {
    "four": Way(4, _rows),
    "tensor parallel": Way(4, _tensor_parallel),
    "hybrid": Way(4, _hybrid),
    "columns": Way(3, _columns),
    "one": Way(1, _rows),
    "two": Way(2, _rows),
    "three": Way(3, _rows),
    "copies": Way(3, _copies),
    "all axes": Way(8, _all_axes),
}


def give(model: nn.Module, whole: dict[str, torch.Tensor], way: Way | None) -> None:
    """Make ``whole`` the gradients of ``model``, cut as it is; ``way``: None: it is not sharded."""
    carrier = nn.Module()
    for name, gradient in whole.items():
        carrier.register_parameter(name, nn.Parameter(gradient.clone()))
    if way is not None:
        way.apply(carrier)
    for name, param in model.named_parameters():
        param.grad = carrier.get_parameter(name).detach()


def _full(tensor: Any) -> torch.Tensor:
    """The whole tensor. torch's own keeps plans by mesh, and mixes up ranks that are threads."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    whole = torch.full(tensor.shape, -torch.inf, dtype=torch.float64)
    part = box_here(spec_of(tensor)).of(whole)
    part.copy_(local_shard(tensor.detach()))
    dist.all_reduce(whole, dist.ReduceOp.MAX)
    return whole.to(tensor.dtype)


def full_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole parameters; every rank calls it."""
    return {name: _full(param) for name, param in model.named_parameters()}


def full_state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, torch.Tensor]]:
    """The whole state of each parameter; every rank calls it."""
    state = optimizer.state_dict()["state"]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = {id(param): number for number, param in enumerate(params)}
    return {
        name: {key: _full(value) for key, value in state[numbers[id(param)]].items()}
        for name, param in model.named_parameters()
    }

"""A workload: a model, its units, its batches and its loss.

Owns the interface between a model and the measurement. Refuses to know who shards the model, and
how: every contestant is handed the same workload.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

__all__ = ["Shape", "Workload", "fill", "fill_locally"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How much one rank computes in a step: rows of so many tokens."""

    rows: int
    tokens: int


def normal_or_constant(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """A parameter's first value: matrices normal with deviation 0.02, weights 1, biases 0."""
    if len(shape) >= 2:
        return torch.randn(shape, generator=generator, device=generator.device) * 0.02
    value = 0.0 if name.endswith("bias") else 1.0
    return torch.full(tuple(shape), value, device=generator.device)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Model to train, with its batches and its loss.

    Attributes:
        name: how results call it.
        build: returns the model. If `on_meta`, it is called on the meta device and the parameters
            are filled by `initial`; else it is called on the training device, with torch's random
            numbers seeded alike on all ranks.
        units: the modules that are sharded one by one, in the order in which they run; what they
            leave is the root's.
        batch: one rank's batch, from a generator on the CPU; tensors are moved to the device.
        loss: the mean loss of a batch, a scalar. The function must call the model once, by
            `model(...)`.
        items: how many items a batch has; the unit of speed.
        item: what they are, in the plural.
        on_meta: whether the model may be built without memory; it then must have no buffers.
        initial: the first value of a parameter by its name and shape, drawn from a generator on the
            device.
    """

    name: str
    build: Callable[[], nn.Module]
    units: Callable[[Any], Sequence[nn.Module]]
    batch: Callable[[torch.Generator], Sequence[torch.Tensor]]
    loss: Callable[[nn.Module, Sequence[torch.Tensor]], torch.Tensor]
    items: int
    item: str = "tokens"
    on_meta: bool = False
    initial: Callable[[str, torch.Size, torch.Generator], torch.Tensor] = normal_or_constant


@torch.no_grad()
def fill(model: nn.Module, workload: Workload, seed: int, device: torch.device) -> None:
    """Give every parameter its first value; of a sharded one, this rank's part of that value.

    A parameter is drawn whole from a separate generator, so that every contestant has equal initial
    values on any mesh.
    """
    for name, parameter in model.named_parameters():
        generator = torch.Generator(device).manual_seed(
            seed * 1_000_003 + zlib.crc32(name.encode())
        )
        value = workload.initial(name, parameter.shape, generator)
        value = value.to(parameter.device, parameter.dtype)
        if isinstance(parameter, DTensor):
            # src_data_rank=None: cut the local value, which all ranks drew alike.
            mesh, placements = parameter.device_mesh, parameter.placements
            value = distribute_tensor(value, mesh, placements, src_data_rank=None)
        parameter.copy_(value)


@torch.no_grad()
def fill_locally(model: nn.Module) -> None:
    """Give every local shard small normal values: for worlds in which values mean nothing."""
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        local.normal_(std=0.02)

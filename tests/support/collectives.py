"""Collectives that tell a function of each call, and what tests of lists of tensors share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm import (
    CommStreams,
    DefaultAllGather,
    DefaultReduceScatter,
    GatherConfig,
    ReduceConfig,
    ReduceScaling,
    TensorSpec,
    default_all_gather,
    default_reduce_scatter,
    reduction_scaling,
)


def reduce_config(
    group: dist.ProcessGroup,
    comm: Any = None,
    scaling: ReduceScaling | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> ReduceConfig:
    """Reductions of a group named blocks.0, to the mean, by the default collective on the CPU.

    ``options`` say otherwise: streams, device, name and others.
    """
    return ReduceConfig(
        comm=default_reduce_scatter(group) if comm is None else comm,
        process_group=group,
        scaling=scaling or reduction_scaling(group.size(), dtype, averages=False),
        **{"name": "blocks.0", **_on_the_cpu(options)},
    )


def gather_config(group: dist.ProcessGroup, comm: Any = None, **options: Any) -> GatherConfig:
    """Gathers by the default collective on the CPU; ``options`` say otherwise."""
    return GatherConfig(
        comm=default_all_gather(group) if comm is None else comm,
        process_group=group,
        **_on_the_cpu(options),
    )


def _on_the_cpu(options: dict[str, Any]) -> dict[str, Any]:
    device = options.get("device", torch.device("cpu", 0))
    return {"device": device, "streams": CommStreams(device), **options}


def shard_of(full: torch.Tensor, spec: TensorSpec, rank: int, world_size: int) -> torch.Tensor:
    """A rank's shard of a full tensor, by plain slicing: a view."""
    rows = spec.shard_shape(rank, world_size)[spec.dim]
    first = spec.first_row(rank, world_size)
    return full.reshape(spec.laid_shape).narrow(spec.dim, first, rows)


def drawn_gradients(rank: int, specs: Sequence[TensorSpec], seed: int) -> list[torch.Tensor | None]:
    """Of the order of 1e-4, some of them missing, different on every rank."""
    generator = torch.Generator().manual_seed(seed * 64 + rank)
    drawn: list[torch.Tensor | None] = []
    for spec in specs:
        there = torch.rand((), generator=generator).item() < 0.7
        gradient = torch.randn(spec.shape, generator=generator) * 1e-4
        drawn.append(gradient if there else None)
    return drawn


class Allocates:
    """What any collective of a user's own begins with: buffers from torch's allocator."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


Tell = Callable[[torch.Tensor, dist.ProcessGroup], None]


class ToldAllGather(DefaultAllGather):
    """The default, after ``tell(output, group)``."""

    def __init__(self, tell: Tell) -> None:
        super().__init__()
        self._tell = tell

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        self._tell(output_tensor, group)
        return super().__call__(output_tensor, input_tensor, group, async_op)


class ToldReduceScatter(DefaultReduceScatter):
    """The default, after ``tell(input, group)``."""

    def __init__(self, tell: Tell) -> None:
        super().__init__()
        self._tell = tell

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self._tell(input_tensor, group)
        return super().__call__(output_tensor, input_tensor, group, op, async_op)

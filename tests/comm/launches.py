"""Collectives of every kind with inputs that all ranks know, and their results by definition."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fullshard.comm import Transport
from support.ranks import world

SUM = dist.ReduceOp.SUM


def part_of(rank: int, numel: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """What a rank hands in: known to all, different on each."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randint(-50, 50, (numel,), generator=generator).to(dtype)


def in_rank_order(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum by its definition."""
    wide = torch.float32 if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)


def finish(work: dist.Work | None) -> None:
    """Wait for a collective, if it is not over."""
    if work is not None:
        work.wait()


def launch(
    transport: Transport,
    kind: str,
    numel: int,
    dtype: torch.dtype,
    *,
    salt: int = 0,
    async_op: bool = True,
) -> tuple[dist.Work | None, torch.Tensor, torch.Tensor]:
    """A collective of the world in flight, what it fills, and that by its definition.

    The kinds are "gather", "gather in place", "reduction", "largest parts", "all-reduce" and
    "largest".
    """
    group, rank, size = world(), world().rank(), world().size()
    parts = [part_of(each, numel * size, dtype, salt) for each in range(size)]
    if kind.startswith("gather"):
        output = torch.zeros(numel * size).to(dtype)
        own = [each[:numel].clone() for each in parts]
        given_in = own[rank]
        if kind == "gather in place":
            given_in = output[numel * rank : numel * (rank + 1)].copy_(own[rank])
        return transport.all_gather(output, given_in, group, async_op), output, torch.cat(own)
    op = dist.ReduceOp.MAX if kind.startswith("largest") else SUM
    if kind in ("reduction", "largest parts"):
        output, mine = torch.zeros(numel).to(dtype), parts[rank].clone()
        parts = [each.view(size, -1)[rank] for each in parts]
        work = transport.reduce_scatter(output, mine, group, op, async_op)
    else:
        output = parts[rank].clone()
        work = transport.all_reduce(output, op, group, async_op)
    return work, output, torch.stack(parts).amax(0) if op != SUM else in_rank_order(parts)

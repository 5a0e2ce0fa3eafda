"""Uneven tensors for worlds of any size, and what a collective over them must give."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.comm import CommStreams, TensorSpec
from support.threads.ranks import seeded

# (shape, dim): rows that divide by 128 and that do not, fewer rows than ranks, none, and 0-d.
SHAPES: tuple[tuple[tuple[int, ...], int], ...] = (
    ((256, 3), 0),
    ((300, 2), 0),
    ((129,), 0),
    ((127,), 0),
    ((2, 131), 1),
    ((5, 3), 0),
    ((1, 4), 0),
    ((0, 3), 0),
    ((), 0),
)
MIXED = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64)


class BlockingStreams(CommStreams):
    """Streams that do not ask for asynchronous work: a collective is done when its call returns."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.asynchronous_work = False


class OneStream(CommStreams):
    """Streams that are all the caller's own: the order of calls is the order of everything."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.copy_in = self.gather = self.reduce = self.all_reduce = self.current()


def specs_of(dtypes: Sequence[torch.dtype]) -> list[TensorSpec]:
    """One spec per shape; the dtypes take turns."""
    return [
        TensorSpec(shape=shape, dtype=dtypes[index % len(dtypes)], dim=dim)
        for index, (shape, dim) in enumerate(SHAPES)
    ]


def full_tensors(specs: Sequence[TensorSpec], *seed: int) -> list[torch.Tensor]:
    """Full tensors with values of size 1 (integers: up to 100) that follow from ``seed``."""
    tensors = []
    for index, spec in enumerate(specs):
        generator = seeded(index, *seed)
        if spec.dtype.is_floating_point:
            tensors.append(torch.randn(spec.shape, generator=generator).to(spec.dtype))
        else:
            tensors.append(torch.randint(100, spec.shape, generator=generator, dtype=spec.dtype))
    return tensors


def shard_of(full: torch.Tensor, dim: int, rank: int, world_size: int) -> torch.Tensor:
    """``rank``'s part of ``full`` as ``torch.chunk`` cuts it: empty where there are fewer parts."""
    laid = full if full.ndim else full.view(1)
    parts = laid.chunk(world_size, dim) if laid.size(dim) else ()
    part = parts[rank] if rank < len(parts) else laid.narrow(dim, 0, 0)
    return part.contiguous()


def shards_of(
    fulls: Sequence[torch.Tensor], specs: Sequence[TensorSpec], rank: int, world_size: int
) -> list[torch.Tensor]:
    """``rank``'s part of each full tensor."""
    pairs = zip(fulls, specs, strict=True)
    return [shard_of(full, spec.dim, rank, world_size) for full, spec in pairs]


def mean_and_bound(
    gradients: Sequence[torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean over ranks, in fp64, and how far ``dtype`` may be from it.

    Each of the N additions and the two scalings round once, by at most half an ulp of what is then
    at most the sum of magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, 4.2); in
    fp16, what falls below its smallest number goes too.
    """
    stack = torch.stack([each.double() for each in gradients])
    info = torch.finfo(dtype)
    roundings = len(gradients) + 2
    magnitudes = stack.abs().sum(0)
    absolute = roundings * info.smallest_normal * info.eps * len(gradients)
    bound = (1.02 * roundings * info.eps / 2 * magnitudes + absolute) / len(gradients)
    return stack.mean(0), bound

"""Collectives that tell a function of each call, and the allocation that torch asks of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm import DefaultAllGather, DefaultReduceScatter

__all__ = ["Allocates", "ToldAllGather", "ToldReduceScatter"]


class Allocates:
    """What any collective of a user's own begins with: buffers from torch's allocator."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """New memory of that many elements."""
        return torch.empty(*size, dtype=dtype, device=device)


class ToldAllGather(DefaultAllGather):
    """The default, after ``tell(output, group)``."""

    def __init__(self, tell: Callable[[torch.Tensor, dist.ProcessGroup], None]) -> None:
        super().__init__()
        self._tell = tell

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._tell(output_tensor, group)
        return super().__call__(output_tensor, input_tensor, group, async_op)


class ToldReduceScatter(DefaultReduceScatter):
    """The default, after ``tell(input, group)``."""

    def __init__(self, tell: Callable[[torch.Tensor, dist.ProcessGroup], None]) -> None:
        super().__init__()
        self._tell = tell

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._tell(input_tensor, group)
        return super().__call__(output_tensor, input_tensor, group, op, async_op)

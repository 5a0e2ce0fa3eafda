"""What a parameter must be for ``fully_shard`` to take it.

Owns the checks of one parameter, which come before anything changes; where it is cut is not its
affair.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["require_shardable"]


def require_shardable(name: str, param: nn.Parameter) -> None:
    """Returns if ``param`` can be sharded.

    Raises:
        ValueError: if not, naming it and saying what to do.
    """
    if isinstance(param, DTensor):
        raise ValueError(
            f"{name} is a DTensor already; fully_shard takes plain parameters on a 1-D mesh"
        )
    if param.ndim == 0:
        raise ValueError(f"{name} has no dimension to cut; make it a 1-D tensor with one element")
    if param.layout != torch.strided:
        raise ValueError(f"{name} has layout {param.layout}; fully_shard takes strided parameters")

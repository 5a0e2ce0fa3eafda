"""Private names of torch: the one file of this package that may use them.

Each function names the private name and the reason; each was seen on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import ShardedTensor

__all__ = ["ShardMetadata", "ShardedTensor", "process_group_of", "set_timeout"]


def process_group_of(tensor: ShardedTensor) -> dist.ProcessGroup:
    """Return the ranks over which it is cut (``_process_group``).

    torch's FSDP1 and its reader of optimizer state give this type, which has no public name.
    """
    process_group: dist.ProcessGroup = tensor._process_group
    return process_group


def set_timeout(process_group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Let collectives of a gloo group wait this long for a rank (``_set_pg_timeout``).

    ``new_group`` takes one time-out, for the collectives and for the ranks to connect. Since torch
    2.15 the function is public, as ``set_timeout``.
    """
    public: Any = getattr(dist, "set_timeout", None)
    (public or dist.distributed_c10d._set_pg_timeout)(timeout, process_group)

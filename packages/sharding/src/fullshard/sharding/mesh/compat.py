"""Private names of torch that meshes use, each with the reason."""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["count_of_process_groups"]


def count_of_process_groups() -> int:
    """Return the number after which torch names a group that ranks make without the other ranks.

    The function counts the groups that this rank is in (``_world.pg_names``: 2.11, 2.13), or the
    groups that this rank took part in making (``_world.group_count``: 2.15).
    """
    torchs = dist.distributed_c10d
    if "group_count" in torchs._hash_ranks_to_str.__code__.co_names:
        return int(torchs._world.group_count)
    return len(torchs._world.pg_names)

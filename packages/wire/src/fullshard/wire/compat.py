"""Torch's private names, as far as this package needs them, in one place.

- ``torch.distributed.distributed_c10d._world.pg_names`` (2.11, 2.13) and ``group_count`` (2.15), as
  ``_hash_ranks_to_str`` reads one of them: a number of process groups. torch names a group that
  ranks make without other ranks after this number. Ranks with different numbers wait for each
  other forever.
"""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["count_of_process_groups"]


def count_of_process_groups() -> int:
    """Return the number after which torch names a group that ranks make without other ranks."""
    torchs = dist.distributed_c10d
    if "group_count" in torchs._hash_ranks_to_str.__code__.co_names:
        return int(torchs._world.group_count)
    return len(torchs._world.pg_names)

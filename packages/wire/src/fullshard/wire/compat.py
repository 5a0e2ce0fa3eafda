"""Torch's private names, as far as this package needs them, in one place.

- ``torch.distributed.distributed_c10d._world.pg_names`` (seen on 2.11, 2.13 and 2.15): how many
  process groups this rank is in. If ranks make a group without other ranks, torch names it after
  this number. Ranks with different numbers wait for each other forever.
"""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["count_of_process_groups"]


def count_of_process_groups() -> int:
    """Return how many process groups this rank is in."""
    return len(dist.distributed_c10d._world.pg_names)

"""Torch's private names, as far as this package needs them, in one place.

- ``torch.distributed.distributed_c10d._world.pg_names`` (seen on 2.11, 2.13 and 2.15): how many
  process groups this rank is in. Torch names a group that its ranks make without the others after
  their number, and ranks that are in more or in fewer wait for each other for ever.
"""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["count_of_process_groups"]


def count_of_process_groups() -> int:
    """Returns how many process groups this rank is in."""
    return len(dist.distributed_c10d._world.pg_names)

"""Files of weights that the first of several ranks writes for all."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from support.weights import saved


def saved_for_all(folder: Path, state: dict[str, torch.Tensor], files: int = 1) -> None:
    """Saves ``state`` on rank 0; no rank returns before it is there."""
    if dist.get_rank() == 0:
        saved(folder, state, files)
    dist.barrier()

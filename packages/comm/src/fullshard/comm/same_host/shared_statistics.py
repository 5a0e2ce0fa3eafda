"""Counts the memory that the ranks of a process group share on their host.

Owns the numbers' definitions. Refuses: setting anything up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from fullshard.comm.same_host.shared_group import known_group

__all__ = ["SharedMemoryStatistics", "shared_memory_statistics"]


@dataclass(frozen=True, kw_only=True)
class SharedMemoryStatistics:
    """Memory that the ranks of one process group share, as this rank maps it.

    Attributes:
        buffers: groups of parameters that are gathered in it.
        buffer_bytes: of their full parameters, in whole pages.
        frames: places in which they lie by turns; see ``set_shared_frames``.
        frame_bytes: of these, once for all ranks.
        reduction_bytes: in which reductions and other collectives travel, once for all ranks.
        moved_out: how often this rank moved parameters that it used to private memory, because
            others were gathered where they lay.
        refused: how often there was no memory for a buffer, so that a group is gathered into
            private memory.
    """

    buffers: int = 0
    buffer_bytes: int = 0
    frames: int = 0
    frame_bytes: int = 0
    reduction_bytes: int = 0
    moved_out: int = 0
    refused: int = 0


def shared_memory_statistics(process_group: dist.ProcessGroup) -> SharedMemoryStatistics:
    """What the ranks of ``process_group`` share now; zeros where they share nothing.

    It communicates nothing.
    """
    group = known_group(process_group)
    if group is None:
        return SharedMemoryStatistics()
    frames = group.frames
    return SharedMemoryStatistics(
        buffers=len(frames.windows),
        buffer_bytes=sum(window.nbytes for window in frames.windows),
        frames=len(frames.sizes),
        frame_bytes=sum(frames.sizes),
        reduction_bytes=group.capacity,
        moved_out=frames.moved_out,
        refused=frames.refused,
    )

"""When small collectives that follow one another had better be one.

Owns: the sizes. [Note: slices] A collective over N ranks takes N - 1 steps or more, in each of
which a rank sends a slice; below some size of the slice a step takes as long as the message takes
to be under way at all. The size of one rank's slice counts, not the sum over ranks. Refuses:
devices with streams, where nothing was measured, ranks that share memory, where a launch costs next
to nothing, and collectives of a user's own, which are called as the user would expect.
"""

from __future__ import annotations

from fullshard.comm.layouts.layout import Layout
from fullshard.comm.transports.config import GatherConfig, ReduceConfig

__all__ = ["coalesced_cap_mb", "coalescing_pays", "configs_coalesce"]

_SLICES_CAP_MB = 0.5  # one rank's slices in a launch: the next launch must not wait long
_CAP_MB = 25.0  # of all ranks' slices: memory


def coalescing_pays(layout: Layout, config: GatherConfig | ReduceConfig) -> bool:
    """Whether a collective had better share its launch with its neighbours.

    This is so if the collective reports that launches of this size cost more than the bytes they
    move (``coalesced_up_to``), and the device has no streams. All ranks find the same.
    """
    if layout.world_size == 1 or not config.streams.asynchronous_work:
        return False
    limit = config.collective.offers.coalesced_up_to(config.process_group, config.device)
    return 0 < layout.buffer.slice_nbytes <= limit


def configs_coalesce(one: GatherConfig | ReduceConfig, other: GatherConfig | ReduceConfig) -> bool:
    """Whether collectives of two configs can be one: all but the configs' names is alike."""
    return one == other and one.collective.coalesces_with(other.collective)


def coalesced_cap_mb(world_size: int) -> float:
    """MiB that one launch moves at most when it is shared, the slices of all ranks counted."""
    return min(_CAP_MB, _SLICES_CAP_MB * world_size)

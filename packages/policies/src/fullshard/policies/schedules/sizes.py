"""When small collectives that follow one another had better be one.

Owns: the sizes. [Note: slices] A collective over N ranks takes N - 1 steps or more, in each of
which a rank sends a slice; below some size of the slice a step takes as long as the message takes
to be under way at all. The size of one rank's slice counts, not the sum over ranks. Refuses:
devices with streams, where nothing was measured, ranks that share memory, where a launch costs next
to nothing, and transports and collectives of a user's own, which are called as the user would
expect.
"""

from __future__ import annotations

from fullshard.comm import (
    GatherConfig,
    Layout,
    ProcessGroupTransport,
    ReduceConfig,
)
from fullshard.comm.spi import default_transport, traits_of

__all__ = ["alike", "default_cap", "pays"]

_MIB = 2**20
_SLICES_CAP = 0.5 * _MIB  # one rank's slices in a launch: the next launch must not wait long
_CAP = 25.0 * _MIB  # of all ranks' slices: memory
_SMALL = 64 << 10
"""Bytes of one rank's slice up to which a launch costs more than its bytes, with gloo."""


def pays(layout: Layout, config: GatherConfig | ReduceConfig) -> bool:
    """Whether a collective had better share its launch with its neighbours; equal on all ranks.

    A collective call at a process group's first time, as the transport of the group may be chosen.
    """
    traits = traits_of(config.device)
    if traits.queued or not traits.shared_memory or not config.collective.offers.is_automatic:
        return False
    if layout.world_size == 1 or not 0 < layout.buffer.slice_nbytes <= _SMALL:
        return False
    group = config.process_group
    moves = default_transport(group).resolve(group, config.device)
    return isinstance(moves, ProcessGroupTransport)


def alike(one: GatherConfig | ReduceConfig, other: GatherConfig | ReduceConfig) -> bool:
    """Whether default collectives of two configs can be one: all but the names is alike."""
    automatic = one.collective.offers.is_automatic and other.collective.offers.is_automatic
    return automatic and one == other


def default_cap(world_size: int) -> float:
    """Bytes that one launch moves at most when it is shared, the slices of all ranks counted."""
    return min(_CAP, _SLICES_CAP * world_size)

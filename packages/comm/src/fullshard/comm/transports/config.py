"""What the collectives of one kind share: the collective, its ranks, streams, device and buffers.

Owns: the configuration that a caller makes once and hands to each call. Refuses: anything that
differs between two calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from fullshard.comm.buffers.buffers import BufferSource, NewBuffers
from fullshard.comm.layouts.scaling import ReduceScaling
from fullshard.comm.runtime.streams import CommStreams, canonical_device
from fullshard.comm.transports.collective import AllGatherLike, ReduceScatterLike

__all__ = ["GatherLane", "ReduceLane"]


@dataclass(frozen=True, kw_only=True)
class GatherLane:
    """What gathers of one kind share: as named, and where buffers come from; new ones by default.

    ``name`` is for events and messages.
    """

    comm: AllGatherLike
    process_group: dist.ProcessGroup
    streams: CommStreams
    device: torch.device
    name: str = ""
    source: BufferSource = field(default_factory=NewBuffers)

    def __post_init__(self) -> None:
        """Name the device as tensors do, so that comparing is one comparison."""
        object.__setattr__(self, "device", canonical_device(self.device))


@dataclass(frozen=True, kw_only=True)
class ReduceLane:
    """What reductions of one kind share: as a gather's lane, and how the result is scaled.

    ``inputs_in_flight`` packed inputs may be alive at once, the one being packed counted in;
    ``source`` says where they come from. Results are always new: they may become gradients.
    """

    comm: ReduceScatterLike
    process_group: dist.ProcessGroup
    streams: CommStreams
    device: torch.device
    scaling: ReduceScaling
    name: str = ""
    inputs_in_flight: int = 2
    source: BufferSource = field(default_factory=NewBuffers)

    def __post_init__(self) -> None:
        """Name the device as tensors do, so that comparing is one comparison."""
        object.__setattr__(self, "device", canonical_device(self.device))

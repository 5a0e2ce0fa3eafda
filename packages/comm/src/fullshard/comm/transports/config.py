"""Configuration that collectives share: the collective, ranks, streams, device and buffers.

The main classes are ``GatherConfig`` and ``ReduceConfig``, which a caller makes once and passes to
each call. ``collective`` adapts a user's own collective; anything that differs between calls is an
argument of the call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.distributed as dist

from fullshard.comm.buffers.buffers import BufferSource
from fullshard.comm.layouts.scaling import ReduceScaling
from fullshard.comm.runtime.observer import EventKind, Mark, emit
from fullshard.comm.runtime.process_exit import finish_threads_at_exit
from fullshard.comm.runtime.process_watch import record_process
from fullshard.comm.runtime.streams import CommStreams, canonical_device
from fullshard.comm.transports.collective import AllGather, Collective, ReduceScatter

__all__ = ["GatherConfig", "ReduceConfig"]


@dataclass(frozen=True, kw_only=True)
class _Shared:
    """Settings that gathers and reductions share.

    Attributes:
        comm: the all-gather or the reduce-scatter that moves the bytes.
        process_group: the ranks that take part.
        streams: the streams on which buffers are packed and moved.
        device: the device of shards, gradients and buffers.
        name: the name of the group in events and messages.
        source: provides the buffers; new ones by default.
        collective: what ``comm`` can do, from its declarations.
        kind: the kind of the collective's event.
        what: the word for the collective in messages.
        waits_for: the mark of a wait for the result, as observers see it.
        runs_on: the names of two streams: the stream that packs, and the stream that moves.
    """

    kind: ClassVar[EventKind]
    what: ClassVar[str]
    waits_for: ClassVar[Mark]
    runs_on: ClassVar[tuple[str, str]]
    comm: AllGather | ReduceScatter = field(compare=False)
    process_group: dist.ProcessGroup
    streams: CommStreams
    device: torch.device
    name: str = field(default="", compare=False)
    source: BufferSource = field(default_factory=BufferSource)
    collective: Collective = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Adapt the collective, name the device as tensors do, and prepare for the exit."""
        object.__setattr__(self, "collective", Collective(self.comm))
        object.__setattr__(self, "device", canonical_device(self.device))
        finish_threads_at_exit()
        record_process()

    def emit_launch(self, copied: int, nbytes: int) -> None:
        """Emit the copy event, and the event of the collective if ``nbytes`` is not zero."""
        rank, (packing, moving) = self.process_group.rank(), self.runs_on
        emit(EventKind.COPY_IN, self.name, rank=rank, nbytes=copied, stream=packing)
        if nbytes:
            emit(self.kind, self.name, rank=rank, nbytes=nbytes, stream=moving)


@dataclass(frozen=True, kw_only=True)
class GatherConfig(_Shared):
    """The configuration of gathers; ``source`` provides the buffers, new ones by default."""

    kind = EventKind.ALL_GATHER
    what = "gather"
    waits_for = Mark.WAIT_GATHER
    runs_on = ("copy_in", "gather")
    comm: AllGather = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class ReduceConfig(_Shared):
    """The configuration of reductions: as a gather's config, and how the result is scaled.

    ``inputs_in_flight`` packed inputs may be alive at once, the one being packed counted in;
    ``source`` provides their memory. Results are always new: they may become gradients.

    Attributes:
        scaling: the factors before and after the sum over ranks, and the operation between them.
        inputs_in_flight: the largest number of packed inputs that are allocated at once.
    """

    kind = EventKind.REDUCE_SCATTER
    what = "reduction"
    waits_for = Mark.WAIT_REDUCTION
    runs_on = ("current", "reduce")
    comm: ReduceScatter = field(compare=False)
    scaling: ReduceScaling
    inputs_in_flight: int = 2

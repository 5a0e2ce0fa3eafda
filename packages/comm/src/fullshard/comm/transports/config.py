"""Configuration that collectives share: the collective, ranks, streams, device and buffers.

Owns: the configuration that a caller makes once and passes to each call, and the implementation of
these calls. The first call, which all ranks join, chooses the implementation. Refuses: anything
that differs between calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.distributed as dist

from fullshard.comm.buffers.buffers import BufferSource
from fullshard.comm.layouts.scaling import ReduceScaling
from fullshard.comm.runtime.streams import CommStreams, canonical_device
from fullshard.comm.transports.collective import AllGather, ReduceScatter
from fullshard.comm.transports.contribution import PartsReducer

__all__ = ["Dispatch", "GatherConfig", "ReduceConfig", "choose_anew"]


class Dispatch:
    """The functions that implement the collectives of a config.

    Attributes:
        launch: takes a collective's tensors, process group (operation) and ``async_op``, in this
            order; None until it is chosen.
        narrow_launch: replaces ``launch`` where only the first ranks hold data. It takes the buffer
            of their slices and the process group (and operation). See ``first_ranks``.
        parts: reduces gradients that are not packed, if possible.
    """

    def __init__(self) -> None:
        """Start with no choice."""
        self.launch: Callable[..., dist.Work | None] | None = None
        self.narrow_launch: Callable[..., dist.Work | None] | None = None
        self.parts: PartsReducer | None = None
        _all_chosen.add(self)


_all_chosen: weakref.WeakSet[Dispatch] = weakref.WeakSet()


def choose_anew() -> None:
    """Let every config choose again at its next collective; on all ranks alike."""
    for each in _all_chosen:
        each.launch = None


@dataclass(frozen=True, kw_only=True)
class _Shared:
    """Settings that gathers and reductions share."""

    process_group: dist.ProcessGroup
    streams: CommStreams
    device: torch.device
    name: str = field(default="", compare=False)
    source: BufferSource = field(default_factory=BufferSource)
    chosen: Dispatch = field(default_factory=Dispatch, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Name the device as tensors do, so that comparing is one comparison."""
        object.__setattr__(self, "device", canonical_device(self.device))


@dataclass(frozen=True, kw_only=True)
class GatherConfig(_Shared):
    """The configuration of gathers; ``source`` provides the buffers, new ones by default.

    ``name`` is for events and messages.
    """

    what: ClassVar = "gather"
    runs_on: ClassVar = ("copy_in", "gather")  # packing; moving
    comm: AllGather = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class ReduceConfig(_Shared):
    """The configuration of reductions: as a gather's config, and how the result is scaled.

    ``inputs_in_flight`` packed inputs may be alive at once, the one being packed counted in;
    ``source`` provides their memory. Results are always new: they may become gradients.
    """

    what: ClassVar = "reduction"
    runs_on: ClassVar = ("current", "reduce")
    comm: ReduceScatter = field(compare=False)
    scaling: ReduceScaling
    inputs_in_flight: int = 2

"""The choice of a transport for a process group: shared memory, an all-to-all, or its own.

Owns: the default choice, made at a process group's first collective, its switch, and the numbers
of the memory that ranks share. Refuses: moving bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fullshard.comm import (
    PeerLostError,
    ProcessGroupTransport,
    ReduceOp,
    SelfTransport,
    Transport,
)
from fullshard.comm.spi import EPOCH, Contribution, backend_names, is_reduction, traits_of
from fullshard.samehost.all_to_all import AllToAllTransport
from fullshard.samehost.group import (
    GROUPS,
    SharedBuffer,
    SharedGroup,
    shared_group,
)
from fullshard.samehost.memory import SharedMemoryTransport
from fullshard.samehost.signals import NoRoomError, SharedMemoryError

__all__ = [
    "AutomaticTransport",
    "SharedMemoryStatistics",
    "reset_shared_memory",
    "same_host_transport",
    "set_shared_memory",
    "shared_memory_statistics",
    "shares_memory",
]

_CPU = torch.device("cpu")
_OWN = ProcessGroupTransport()
_ALL_TO_ALL = AllToAllTransport()
_SHARED = SharedMemoryTransport()

"""Bytes of one rank's slice: half of what the input of two ranks measures in ``all_to_all``."""

_LARGEST_EXCHANGE = 1 << 28
"""Bytes of the largest exchange through shared memory, which keeps room for two like it."""

_choices: weakref.WeakKeyDictionary[dist.ProcessGroup, Transport] = weakref.WeakKeyDictionary()
_enabled = True


def set_shared_memory(enabled: bool) -> None:
    """Set whether CPU ranks of one host share memory by default.

    By default they do. Call it on all ranks alike, between collectives; it holds from the next one
    on. The setting does not affect collectives that use ``SharedMemoryTransport`` by name. Groups
    of parameters that were gathered in buffers before (``open_shared_buffer``) go on so.

    Raises:
        TypeError: if ``enabled`` is not a bool.
    """
    global _enabled
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled is {enabled!r}, a {type(enabled).__name__}; pass True or False")
    _enabled = enabled
    EPOCH[0] += 1


def reset_shared_memory() -> None:
    """Let process groups share memory again, from the next collective of each group.

    For a program that continues after a ``CollectiveMismatchError``, such as a notebook: the memory
    of the process group is out of use then, for later models too. Call it on all ranks
    alike, once each rank has caught the error, and shard a new model: a model that was gathered in
    the old memory keeps that memory. The call communicates nothing; the next collective
    does. A rank that has ended (``PeerLostError``) stays lost.
    """
    GROUPS.clear()
    _choices.clear()
    EPOCH[0] += 1


def same_host_transport(process_group: dist.ProcessGroup) -> Transport:
    """Return the transport for ``process_group``: shared memory, if all its ranks can share it.

    Otherwise return ``AllToAllTransport`` for gloo between hosts, and the group's own transport for
    other backends.

    A collective call at a process group's first time: all ranks get the same answer. Shared memory
    is for processes on one host that speak gloo on CPU; *self* is for one rank.
    """
    choice = _choices.get(process_group)
    if choice is None:
        choice = _choices[process_group] = _choose(process_group)
    return choice


def shares_memory(process_group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ``AutomaticTransport`` would move tensors on ``device`` through memory set up before.

    The same on all ranks; it communicates nothing.
    """
    return _may_share(device) and _choices.get(process_group) is _SHARED


def _may_share(device: torch.device) -> bool:
    return _enabled and traits_of(device).shared_memory


def _transport_for(process_group: dist.ProcessGroup, device: torch.device) -> Transport:
    """Return the transport for tensors on ``device``. A collective call, as the choice is."""
    return same_host_transport(process_group) if _may_share(device) else _OWN


def _choose(process_group: dist.ProcessGroup) -> Transport:
    if process_group.size() == 1:
        return SelfTransport()
    if backend_names(process_group, _CPU) != ("gloo",):
        return _OWN
    try:
        shared_group(process_group)
    except (SharedMemoryError, PeerLostError):
        return _ALL_TO_ALL
    return _SHARED


@dataclass(frozen=True, slots=True)
class AutomaticTransport(Transport):
    """The transport that ``same_host_transport`` chooses, or the group's own where memory is short.

    The choice is looked up at each collective; ranks find each other at the first. A
    collective for which there is no memory uses the process group's own transport. After
    ``set_shared_memory(False)`` every collective does.
    """

    @property
    def is_automatic(self) -> bool:
        """True."""
        return True

    def resolve(self, process_group: dist.ProcessGroup, device: torch.device) -> Transport:
        """Return the transport for ``device`` until ``set_shared_memory`` is called: to be kept.

        Itself where that is shared memory, for which there may be no room. A collective call.
        """
        choice = _transport_for(process_group, device)
        return self if choice is _SHARED else choice

    def all_gather(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        process_group: dist.ProcessGroup,
        async_op: bool,
    ) -> dist.Work | None:
        """Every rank's ``input`` (``[n]``) in ``output`` (``[world * n]``), in rank order."""
        transport = _transport_for(process_group, output.device)
        try:
            return transport.all_gather(output, input, process_group, async_op)
        except NoRoomError:  # on all ranks
            return _OWN.all_gather(output, input, process_group, async_op)

    def is_set_up(self, process_group: dist.ProcessGroup, device: torch.device) -> bool:
        """Return whether ranks share memory, and did so before."""
        return shares_memory(process_group, device)

    def exchange(
        self,
        process_group: dist.ProcessGroup,
        device: torch.device,
        nbytes: int,
        write: Callable[[torch.Tensor], None],
        read: Callable[[torch.Tensor], None],
    ) -> dist.Work | None:
        """As ``SharedMemoryTransport.exchange``; None, on all ranks, if it is too large."""
        if not (0 < nbytes <= _LARGEST_EXCHANGE and shares_memory(process_group, device)):
            return None
        try:
            return _SHARED.exchange(process_group, device, nbytes, write, read)
        except NoRoomError:  # on all ranks
            return None

    def open_shared_buffer(
        self, process_group: dist.ProcessGroup, nbytes: int
    ) -> SharedBuffer | None:
        """Return memory that all ranks map, if the ranks share memory; else None. A collective."""
        if _transport_for(process_group, _CPU) is not _SHARED:
            return None
        try:
            return _SHARED.open_shared_buffer(process_group, nbytes)
        except NoRoomError:  # on all ranks
            return None

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        process_group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool,
    ) -> dist.Work | None:
        """In ``output`` (``[n]``), this rank's part of the reduced ``input`` (``[world * n]``)."""
        transport = _transport_for(process_group, output.device) if is_reduction(op) else _OWN
        try:
            return transport.reduce_scatter(output, input, process_group, op, async_op)
        except NoRoomError:  # on all ranks
            return _OWN.reduce_scatter(output, input, process_group, op, async_op)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: ReduceOp,
        process_group: dist.ProcessGroup,
        async_op: bool,
    ) -> dist.Work | None:
        """Every rank's ``tensor`` reduced, in place: equal on all ranks, to the last bit."""
        transport = _transport_for(process_group, tensor.device) if is_reduction(op) else _OWN
        try:
            return transport.all_reduce(tensor, op, process_group, async_op)
        except NoRoomError:  # on all ranks
            return _OWN.all_reduce(tensor, op, process_group, async_op)

    def parts_reducer(
        self, process_group: dist.ProcessGroup, device: torch.device, op: ReduceOp
    ) -> AutomaticTransport | None:
        """Return this transport if the ranks share memory. A collective call, as the others."""
        shares = is_reduction(op) and _transport_for(process_group, device) is _SHARED
        return self if shares else None

    def reduce_parts(
        self,
        allocate: Callable[[], torch.Tensor],
        contribution: Contribution,
        process_group: dist.ProcessGroup,
        op: ReduceOp,
    ) -> dist.Work | None:
        """As ``SharedMemoryTransport.reduce_parts``; None, on all ranks, if there is no room."""
        try:
            return _SHARED.reduce_parts(allocate, contribution, process_group, op)
        except NoRoomError:  # on all ranks
            return None


@dataclass(frozen=True, kw_only=True)
class SharedMemoryStatistics:
    """Memory that the ranks of one process group share, as this rank maps it.

    Attributes:
        buffers: the number of parameter groups that are gathered in shared memory.
        buffer_bytes: of their full parameters, in whole pages.
        frames: the number of frames that the buffers use in turn; see ``set_shared_frames``.
        frame_bytes: memory that they take now, once for all ranks.
        reduction_bytes: in which reductions and other collectives travel, once for all ranks.
        moved_out: how often this rank moved parameters in use to private memory, because another
            group was gathered into the same frame.
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
    """Return what memory ``process_group`` shares now; zeros where they share nothing.

    It communicates nothing.
    """
    group = GROUPS.get(process_group)
    if not isinstance(group, SharedGroup):
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

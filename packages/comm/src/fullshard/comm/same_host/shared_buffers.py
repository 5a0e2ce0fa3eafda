"""Gathers shards in place, into full tensors that all ranks of a host map.

Owns: a gather in which each rank writes its shards where they belong in the full tensors, once, and
reads the others' from there: nothing is packed, sent or unpacked. Refuses: making such memory (a
collective's ``open_shared_buffer`` does, where its transport can), and knowing for how long it is
used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fullshard.comm.debug.debug import DEBUGGED, check_layout
from fullshard.comm.layouts import checks
from fullshard.comm.layouts.layout import Layout
from fullshard.comm.runtime import compat
from fullshard.comm.runtime.observer import LISTENERS, TIMELINES, EventKind, Mark, emit, mark
from fullshard.comm.runtime.ranges import NOTHING, is_profiled, named_range
from fullshard.comm.same_host.shared_signals import PeerLostError
from fullshard.comm.transports.config import GatherConfig
from fullshard.comm.transports.transport import GatherBuffer

__all__ = ["SharedGatherInFlight", "SharedTensors", "foreach_all_gather_in_place"]


class SharedTensors:
    """Full tensors in a shared buffer, which gathers of one layout fill again and again.

    Attributes:
        buffer: where they lie.
        layout: their shapes and how they are cut; its buffers are not used.
        nbytes: of all of them.
    """

    def __init__(
        self,
        buffer: GatherBuffer,
        fulls: Sequence[torch.Tensor],
        layout: Layout,
        config: GatherConfig,
    ) -> None:
        """Take tensors in the memory of ``buffer``, ``layout.specs[i].shape``.

        Raises:
            ValueError: if they do not fit the layout.
        """
        rank = checks.check_world(layout, config.process_group, config.name)
        checks.check_outputs(fulls, layout, config.device, config.name)
        self.buffer = buffer
        self.layout = layout
        self.nbytes = sum(full.nbytes for full in fulls)
        self.own = [
            full.view(spec.laid_shape).narrow(
                spec.dim,
                spec.first_row(rank, layout.world_size),
                spec.shard_shape(rank, layout.world_size)[spec.dim],
            )
            for full, spec in zip(fulls, layout.specs, strict=True)
        ]
        self._filled = [index for index, own in enumerate(self.own) if own.numel()]
        self._targets = [self.own[index] for index in self._filled]
        self._checked: tuple[torch.Tensor, ...] | None = None

    def check(self, shards: Sequence[torch.Tensor], config: GatherConfig) -> None:
        """Look at shards that are to be written; once, at the same tuple as before.

        Raises:
            ValueError: if they do not fit the layout or the device.
        """
        if shards is self._checked:
            return
        rank = config.process_group.rank()
        checks.check_shards(shards, self.layout, config.device, rank, config.name)
        self._checked = shards if isinstance(shards, tuple) else None

    def write(self, shards: Sequence[torch.Tensor]) -> None:
        """Put this rank's shards in their places; a dtype other than the full tensor's is cast."""
        compat.foreach_copy(self._targets, [shards[index] for index in self._filled])


@dataclass(eq=False)
class SharedGatherInFlight:
    """A gather in a buffer that was issued.

    Attributes:
        full: what it fills.
        work: the handle of the collective.
        name: whose tensors, for messages.
    """

    full: SharedTensors
    work: dist.Work
    name: str

    def wait(self) -> None:
        """Block until every rank's part is there. May be called again."""
        if TIMELINES:
            mark(Mark.WAIT_GATHER, self.name)
        try:
            self.work.wait()
        except PeerLostError as error:
            error.say_where("gather", self.name)
            raise
        finally:
            if TIMELINES:
                mark(Mark.WAIT_ENDED)

    def discard(self) -> None:
        """Wait for a gather whose result is not needed, and leave the buffer."""
        self.wait()
        self.full.buffer.leave()


def foreach_all_gather_in_place(
    shards: Sequence[torch.Tensor], full: SharedTensors, config: GatherConfig
) -> SharedGatherInFlight:
    """Write this rank's shards into shared memory; return the gather in flight.

    After it the full tensors hold every rank's shards. After their use, every rank calls
    ``full.buffer.leave()`` before the next gather.

    Args:
        shards: this rank's shard of each tensor, ``layout.specs[i].shard_shape(rank)``, any dtype.
        full: what to fill.
        config: ranks, device and name; the buffer takes the part of its collective and its buffers.

    Raises:
        ValueError: if shards do not fit the layout or the device.
        CollectiveMismatchError: if the ranks did not come to the same collective: here in debug
            mode, and otherwise in the wait.
    """
    full.check(shards, config)
    if DEBUGGED:
        check_layout(EventKind.ALL_GATHER, config.name, full.layout, config.process_group)
    if LISTENERS:
        rank = config.process_group.rank()
        written = sum(own.nbytes for own in full.own)
        emit(EventKind.COPY_IN, config.name, rank=rank, nbytes=written, stream="copy_in")
        emit(EventKind.ALL_GATHER, config.name, rank=rank, nbytes=full.nbytes, stream="gather")
    with named_range("all_gather", config.name) if is_profiled() else NOTHING:
        try:
            work = full.buffer.gather(lambda: full.write(shards))
        except PeerLostError as error:
            error.say_where("gather", config.name)
            raise
    return SharedGatherInFlight(full, work, config.name)

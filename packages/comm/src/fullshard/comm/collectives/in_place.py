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

from fullshard.comm.collectives.lost_ranks import raise_located, wait_for
from fullshard.comm.layouts import checks
from fullshard.comm.layouts.layout import Layout
from fullshard.comm.runtime import compat
from fullshard.comm.runtime.observer import CHECKS, LISTENERS, EventKind
from fullshard.comm.runtime.ranges import NOTHING, is_profiled, named_range
from fullshard.comm.transports.config import GatherConfig
from fullshard.comm.transports.transport import GatherBuffer

__all__ = ["SharedGatherInFlight", "SharedTensors", "foreach_all_gather_in_place"]


class SharedTensors:
    """Full tensors in a shared buffer, which gathers of one layout fill again and again.

    Attributes:
        buffer: where they lie.
        layout: their shapes and how they are cut; its buffers are not used.
        nbytes: of all of them.
        own_nbytes: of the shards that this rank writes.
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
        own = [
            full.view(spec.laid_shape).narrow(
                spec.dim,
                spec.first_row(rank, layout.world_size),
                spec.shard_shape(rank, layout.world_size)[spec.dim],
            )
            for full, spec in zip(fulls, layout.specs, strict=True)
        ]
        self.own_nbytes = sum(part.nbytes for part in own)
        self._filled = [index for index, part in enumerate(own) if part.numel()]
        self._targets = [own[index] for index in self._filled]

    def write(self, shards: Sequence[torch.Tensor]) -> None:
        """Put this rank's shards in their places; a dtype other than the full tensor's is cast."""
        compat.foreach_copy(self._targets, [shards[index] for index in self._filled])


@dataclass(eq=False)
class SharedGatherInFlight:
    """A gather in a buffer that was issued.

    Attributes:
        full: what it fills.
        work: the handle of the collective.
        config: what it was issued with.
    """

    full: SharedTensors
    work: dist.Work
    config: GatherConfig

    def wait(self) -> None:
        """Block until every rank's part is there. May be called again."""
        wait_for(self.config, self.work)

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
        shards: ``OwnShards.tensors``: this rank's shard of each tensor, of any dtype.
        full: what to fill.
        config: ranks, device and name; the buffer takes the part of its collective and its buffers.

    Raises:
        CollectiveMismatchError: if the ranks did not come to the same collective: here in debug
            mode, and otherwise in the wait.
    """
    if CHECKS:
        group = config.process_group
        checks.check_launch(EventKind.ALL_GATHER, config.name, full.layout, group)
    if LISTENERS:
        config.emit_launch(full.own_nbytes, full.nbytes)
    with named_range("all_gather", config.name) if is_profiled() else NOTHING:
        try:
            work = full.buffer.gather(lambda: full.write(shards))
        except RuntimeError as error:
            raise_located(error, config.what, config.name, config.process_group)
    return SharedGatherInFlight(full, work, config)

"""Unsharding into memory in which the full parameters of a group are complete without copies.

Owns two kinds of such memory: the shards themselves in a world of one, and shared buffers, to which
each rank of a host writes its shards once. The engine packs no data, and copies parameters out only
for a user who may write, or if a graph keeps them in other memory: see [Note: two stores].

*Shards*: nothing is gathered or freed; what an optimizer changes is changed at once. Where they
must be cast, they are, straight into private memory.

*Shared buffers*: a buffer's addresses belong to one group, so a gather refills memory that an
autograd graph aliases, as in [Note: own store]. While the group is sharded, other groups may use
the pages (comm's [Note: frames]). Shared buffers are read-only by contract: all ranks see the
change of one rank, unless its parameters were copied out before.
"""

from __future__ import annotations

from dataclasses import dataclass

from fullshard.comm import EventKind, GatherBuffer, GatherConfig, Layout
from fullshard.comm.spi import (
    OwnShards,
    SharedGatherInFlight,
    SharedTensors,
    emit,
    foreach_all_gather_in_place,
    traits_of,
)
from fullshard.sharding.base.tensors import is_plain
from fullshard.sharding.gather.strategy import (
    GatherInputs,
    Holders,
    ParamStorage,
    UnshardedMemory,
    UnshardStrategy,
    ViewFns,
    offsets_of,
)

__all__ = ["AliasedUnshard", "SharedBufferUnshard", "open_shared_memory"]

# -- a world of one -------------------------------------------------------------------------------


class AliasedShards(ParamStorage):
    """The shards of one group as the memory of its unsharded parameters."""

    outlives_groups = True
    stays = True

    def __init__(self, shards: OwnShards, to_use: ViewFns) -> None:
        """Make the tensors: full shape, with version counters of their own."""
        self._shards = shards
        places = [
            (shard, int(shard.storage_offset()) * shard.dtype.itemsize) for shard in shards.tensors
        ]
        super().__init__(shards.layout.specs, places, to_use)

    def is_of(self, shards: OwnShards) -> bool:
        """Return whether these are the shards; ``GatherInputs`` makes others of other memory."""
        return shards is self._shards


@dataclass(frozen=True, eq=False)
class LocalGather:
    """A gather in a world of one, which moves nothing: the shards are already in flight.

    Attributes:
        shards: the shards, which are all there is.
        alias: the shards as memory of the parameters, if they can be used without a copy.
        name: the name of the group, for events.
    """

    shards: OwnShards
    alias: AliasedShards | None
    name: str


class AliasedUnshard(UnshardStrategy):
    """Parameters are the shards, or a copy of them in another dtype."""

    def __init__(self, memory: UnshardedMemory, inputs: GatherInputs) -> None:
        """Take private memory, and what would be sent."""
        super().__init__(memory, inputs)
        self._alias: AliasedShards | None = None  # the shards of the last gather

    def launch(self, config: GatherConfig, *, async_op: bool) -> LocalGather:
        """Return the shards, and memory that aliases them if possible; nothing is launched."""
        shards = self.inputs.sends(config)
        if self._alias is None or not self._alias.is_of(shards):
            usable = self.memory.can_move and _lie_as_used(shards, config)
            self._alias = AliasedShards(shards, self.memory.to_use) if usable else None
        return LocalGather(shards, self._alias, config.name)

    def finish(self, in_flight: LocalGather, holders: Holders) -> None:
        """Copy where a user may write, or to cast."""
        memory, shards = self.memory, in_flight.shards
        if in_flight.alias is not None:
            memory.point_at(in_flight.alias, holders)
            return
        memory.repoint(memory, holders)
        pairs = zip(shards.tensors, shards.layout.specs, strict=True)
        memory.fill_from([shard.view(spec.shape) for shard, spec in pairs])
        emit(EventKind.COPY_OUT, in_flight.name, rank=0, nbytes=memory.nbytes, stream="current")

    def discard(self, in_flight: LocalGather) -> None:
        """There is nothing to wait for."""


def _lie_as_used(shards: OwnShards, config: GatherConfig) -> bool:
    """Return whether a single rank can use its shards without copies."""
    return all(
        is_plain(shard)
        and shard.dtype is spec.dtype
        and shard.is_contiguous()
        and shard.device == config.device
        for shard, spec in zip(shards.tensors, shards.layout.specs, strict=True)
    )


# -- ranks of one host ----------------------------------------------------------------------------


class SharedMemory(ParamStorage):
    """The unsharded memory of one group in a shared buffer.

    Attributes:
        full: what gathers fill.
        occupied: whether this rank keeps others from gathering here.
    """

    def __init__(
        self, buffer: GatherBuffer, layout: Layout, config: GatherConfig, to_use: ViewFns
    ) -> None:
        """Make the tensors."""
        offsets, _ = offsets_of(layout.specs)
        super().__init__(layout.specs, [(buffer.memory, offset) for offset in offsets], to_use)
        self.full = SharedTensors(buffer, self.write_views, layout, config)
        self.occupied = False

    def allocate(self) -> None:
        """Make the memory this rank's own until it is freed, to be filled by other means."""
        self.occupied = True
        self.full.buffer.move_out()

    def make_private(self) -> None:
        """Move the pages out of the frame, with their contents."""
        self.full.buffer.move_out()

    def free(self) -> None:
        """Let the other ranks gather again."""
        if self.occupied:
            self.occupied = False
            self.full.buffer.leave()


class SharedBufferUnshard(UnshardStrategy):
    """Unsharding into a shared buffer, or into private memory to which the buffer is copied."""

    def __init__(self, memory: UnshardedMemory, inputs: GatherInputs, shared: SharedMemory) -> None:
        """Take private and shared memory of all parameters, and the inputs of the gather."""
        super().__init__(memory, inputs)
        memory.on_free = [shared.free]
        self._shared = shared

    def launch(self, config: GatherConfig, *, async_op: bool) -> SharedGatherInFlight:
        """Write this rank's shards; always asynchronous, whatever ``async_op``."""
        shards = self.inputs.sends(config)
        self._shared.occupied = True
        return foreach_all_gather_in_place(shards.tensors, self._shared.full, config)

    def finish(self, in_flight: SharedGatherInFlight, holders: Holders) -> None:
        """Wait; copy if parameters are in other memory."""
        in_flight.wait()
        self.memory.point_at(self._shared, holders)

    def discard(self, in_flight: SharedGatherInFlight) -> None:
        """Wait: other ranks read what this rank writes."""
        in_flight.wait()


def open_shared_memory(
    layout: Layout, config: GatherConfig, to_use: ViewFns
) -> SharedMemory | None:
    """Return new shared memory, if the config's collective and device have it; a collective."""
    _, nbytes = offsets_of(layout.specs)
    if nbytes == 0 or not traits_of(config.device).shared_memory:
        return None
    buffer = config.collective.offers.open_shared_buffer(config.process_group, nbytes)
    return None if buffer is None else SharedMemory(buffer, layout, config, to_use)

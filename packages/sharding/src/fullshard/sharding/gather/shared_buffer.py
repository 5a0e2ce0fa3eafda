"""Gathers a group in memory that the ranks of one host map: each writes its shards there, once.

Owns that memory and its use. Its addresses are no other group's, so what an autograd graph holds an
alias of is refilled where it lies, as in [Note: own store]; the pages that lie there may serve
other groups, too, while this one is sharded (comm's [Note: frames]). It is read-only by contract:
what one rank changes there, all see, unless it was copied out before; see [Note: two stores].
"""

from __future__ import annotations

from fullshard.comm import GatherBuffer, GatherConfig, Layout
from fullshard.comm.runtime.devices import traits_of
from fullshard.comm.same_host.shared_buffers import (
    SharedGatherInFlight,
    SharedTensors,
    foreach_all_gather_in_place,
)
from fullshard.sharding.gather.inputs import GatherInputs
from fullshard.sharding.gather.strategy import (
    Home,
    ToUse,
    UnshardedMemory,
    UnshardStrategy,
    offsets_of,
)

__all__ = ["SharedBufferUnshard", "open_shared_memory"]


class SharedMemory(Home):
    """The unsharded memory of one group in a shared buffer.

    Attributes:
        full: what gathers fill.
        occupied: whether this rank keeps others from gathering here.
    """

    def __init__(
        self, buffer: GatherBuffer, layout: Layout, config: GatherConfig, to_use: ToUse
    ) -> None:
        """Makes the tensors."""
        offsets, _ = offsets_of(layout.specs)
        super().__init__(layout.specs, [(buffer.memory, offset) for offset in offsets], to_use)
        self.full = SharedTensors(buffer, self.fills, layout, config)
        self.occupied = False

    def allocate(self) -> None:
        """Makes the memory this rank's own until it is freed, to be filled by other means."""
        self.occupied = True
        self.full.buffer.move_out()

    def free(self) -> None:
        """Lets the others gather anew."""
        if self.occupied:
            self.occupied = False
            self.full.buffer.leave()


class SharedBufferUnshard(UnshardStrategy):
    """Parameters lie in a shared buffer, or in private memory to which it is copied."""

    def __init__(self, memory: UnshardedMemory, inputs: GatherInputs, shared: SharedMemory) -> None:
        """Takes private and shared memory of all parameters, and what is sent of them."""
        super().__init__(memory, inputs)
        memory.beside = [shared.free]
        self._shared = shared
        self._in_flight: SharedGatherInFlight | None = None

    def launch(self, config: GatherConfig, *, async_op: bool) -> None:
        """Writes this rank's shards; ``async_op`` says nothing new: it is."""
        shards, shared = self.sends(config), self._shared
        shared.occupied = True
        self._in_flight = foreach_all_gather_in_place(shards.tensors, shared.full, config)

    def land(self, *, private: bool, movable: bool) -> None:
        """Waits; copies where parameters lie elsewhere."""
        self.discard()
        memory, shared = self.memory, self._shared
        memory.move(memory if private else shared, movable=movable)
        if memory.home is not shared:
            memory.fill_from(shared.fills)
            shared.free()

    def discard(self) -> None:
        """Waits."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.wait()


def open_shared_memory(layout: Layout, config: GatherConfig, to_use: ToUse) -> SharedMemory | None:
    """Returns new shared memory, if the config's collective and device have it; a collective."""
    opener = getattr(config.comm, "open_shared_buffer", None)
    _, nbytes = offsets_of(layout.specs)
    if opener is None or nbytes == 0 or not traits_of(config.device).shared_memory:
        return None
    buffer = opener(config.process_group, nbytes)
    return None if buffer is None else SharedMemory(buffer, layout, config, to_use)

"""Gathers a group in memory that the ranks of one host map: each writes its shards there, once.

Owns that memory and its use. Its addresses are no other group's, so what an autograd graph holds an
alias of is refilled where it lies, as in [Note: own store]; the pages that lie there may serve
other groups, too, while this one is sharded (comm's [Note: frames]). It is read-only by contract:
what one rank changes there, all see, unless it was copied out before; see [Note: two stores].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.comm import GatherBuffer, GatherConfig, Layout
from fullshard.comm.same_host.shared_buffers import (
    SharedGatherInFlight,
    SharedTensors,
    foreach_all_gather_in_place,
)
from fullshard.sharding.gather.inputs import GatherInputs
from fullshard.sharding.gather.memory import ToUse, UnshardedMemory, offsets_of, view_of

__all__ = ["SharedBufferUnshard", "open_shared_memory"]


class SharedMemory:
    """The unsharded memory of one group in a shared buffer; a ``Home``.

    Attributes:
        full: what gathers fill.
        fills: see ``Home``.
        seen: see ``Home``.
        kept_by_graphs: False.
        occupied: whether this rank keeps others from gathering here.
    """

    kept_by_graphs = False

    def __init__(
        self, buffer: GatherBuffer, layout: Layout, config: GatherConfig, to_use: ToUse
    ) -> None:
        """Makes the tensors."""
        offsets, _ = offsets_of(layout.specs)
        storage, device = buffer.memory.untyped_storage(), config.device
        with torch.inference_mode(False), torch.no_grad():
            self.fills, again = (
                [
                    view_of(storage, spec, offset, device)
                    for spec, offset in zip(layout.specs, offsets, strict=True)
                ]
                for _ in range(2)
            )
            self.seen = [used(view) for used, view in zip(to_use, again, strict=True)]
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


class SharedBufferUnshard:
    """Parameters lie in a shared buffer, or in private memory to which it is copied."""

    coalesces = None

    def __init__(self, memory: UnshardedMemory, shared: SharedMemory, inputs: GatherInputs) -> None:
        """Takes private and shared memory, and what is sent, of all parameters."""
        self.layout = shared.full.layout
        self._memory = memory
        self._shared = shared
        self._inputs = inputs
        self._in_flight: SharedGatherInFlight | None = None

    @property
    def fills(self) -> Sequence[torch.Tensor]:
        """One tensor per parameter, where it lies."""
        return self._memory.home.fills

    def launch(
        self, staged: Sequence[torch.Tensor], config: GatherConfig, *, async_op: bool
    ) -> None:
        """Writes this rank's shards; ``async_op`` says nothing new: it is."""
        shared = self._shared
        shared.occupied = True
        shards = self._inputs.of(staged, config)
        self._in_flight = foreach_all_gather_in_place(shards.tensors, shared.full, config)

    def land(self, *, private: bool, movable: bool) -> None:
        """Waits; copies where parameters lie elsewhere."""
        self.discard()
        memory, shared = self._memory, self._shared
        memory.move(memory if private else shared, movable=movable)
        if memory.home is not shared:
            memory.fill_from(shared.fills)
            shared.free()

    def discard(self) -> None:
        """Waits."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.wait()

    def free(self) -> None:
        """Lets the others gather anew; frees private memory."""
        self._shared.free()
        self._memory.free()


def open_shared_memory(layout: Layout, config: GatherConfig, to_use: ToUse) -> SharedMemory | None:
    """Returns new shared memory, if the config's collective has such; a collective call."""
    opener = getattr(config.comm, "open_shared_buffer", None)
    _, nbytes = offsets_of(layout.specs)
    if opener is None or nbytes == 0:
        return None
    buffer = opener(config.process_group, nbytes)
    return None if buffer is None else SharedMemory(buffer, layout, config, to_use)

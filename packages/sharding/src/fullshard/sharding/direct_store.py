"""A group's private memory as what gathers fill directly, without a buffer between.

Owns the choice of the parameters that do, and the room that they need: where ranks have unequal
numbers of rows, a gather writes padding behind the parameter. Refuses to allocate: the store does.
"""

from __future__ import annotations

from collections.abc import Sequence

from fullshard.comm import (
    DirectLayout,
    DirectTensors,
    GatherLane,
    Layout,
    TensorSpec,
    direct_gathers,
    list_transport_of,
)
from fullshard.sharding.store import OwnStore

__all__ = ["DirectStore", "direct_rooms"]


def direct_rooms(specs: Sequence[TensorSpec], lane: GatherLane) -> dict[int, int]:
    """Returns the elements that a direct gather writes, by place of each that may be direct."""
    world_size = lane.process_group.size()
    return {
        index: specs[index].chunk_rows(world_size) * specs[index].row_numel * world_size
        for index in direct_gathers(specs, lane.process_group, lane.device)
    }


class DirectStore:
    """The direct gathers of one group, if it has any."""

    def __init__(self, store: OwnStore, packed: Layout) -> None:
        """Takes memory with room, and the layout of all parameters."""
        self._store = store
        self._packed = packed
        self._full: DirectTensors | None = None

    def full(self, lane: GatherLane) -> DirectTensors | None:
        """Returns what a gather fills, if the lane's collective can now; a collective call.

        The store's memory is there then.
        """
        places = tuple(self._store.roomy)
        if not places or not list_transport_of(lane.comm, lane.process_group, lane.device):
            return None
        self._store.allocate()
        if self._full is None:
            layout = DirectLayout(self._packed.specs, self._packed.world_size, places)
            roomy = [self._store.roomy[index] for index in layout.direct]
            self._full = DirectTensors(self._store.fills, roomy, layout, lane)
        return self._full

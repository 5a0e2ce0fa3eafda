"""A group's unsharded parameters in memory that the ranks of one host map.

Owns the tensors over a slot of the group's own. Its addresses are no other group's, so what an
autograd graph holds an alias of is refilled where it lies, as in [Note: own store]; the pages that
lie there may serve other groups, too, while this one is sharded (comm's [Note: frames]). It is
read-only by contract: what one rank changes there, all see, unless it was moved out before.
Refuses: deciding who may use it; see ``PlainContents``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fullshard.comm import GatherLane, GatherSlot, Layout, SlottedTensors
from fullshard.sharding.gather.store import offsets_of, view_of

__all__ = ["SlotStore", "open_slot_store"]


class SlotStore:
    """The unsharded memory of one group, in a slot.

    Attributes:
        full: what gathers fill.
        fills: per parameter the tensor through which a gather writes, full shape, gathered dtype.
        seen: per parameter what the modules see.
    """

    def __init__(
        self,
        slot: GatherSlot,
        layout: Layout,
        lane: GatherLane,
        to_use: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    ) -> None:
        """Makes the tensors; see ``OwnStore``."""
        offsets, _ = offsets_of(layout.specs)
        storage = slot.memory.untyped_storage()
        with torch.inference_mode(False), torch.no_grad():
            self.fills = [
                view_of(storage, spec, offset, lane.device)
                for spec, offset in zip(layout.specs, offsets, strict=True)
            ]
            self.seen = [
                used(view_of(storage, spec, offset, lane.device))
                for spec, offset, used in zip(layout.specs, offsets, to_use, strict=True)
            ]
            self.full = SlottedTensors(slot, self.fills, layout, lane)

    def move_out(self) -> None:
        """Makes the memory this rank's own until it is left, to be filled by other means."""
        self.full.slot.move_out()

    def leave(self) -> None:
        """Lets the others gather anew."""
        self.full.slot.leave()


def open_slot_store(
    layout: Layout, lane: GatherLane, to_use: Sequence[Callable[[torch.Tensor], torch.Tensor]]
) -> SlotStore | None:
    """Returns a store in a new slot, if the lane's collective has such; a collective call."""
    opener = getattr(lane.comm, "open_slot", None)
    _, nbytes = offsets_of(layout.specs)
    if opener is None or nbytes == 0:
        return None
    slot = opener(lane.process_group, nbytes)
    return None if slot is None else SlotStore(slot, layout, lane, to_use)

"""Whether a collective of one rank moves nothing: its result may be its input, as it lies."""

from __future__ import annotations

from fullshard.comm import GatherLane, ReduceLane

__all__ = ["is_alone"]


def is_alone(lane: GatherLane | ReduceLane) -> bool:
    """Tells whether the lane's collective says that nothing is to be moved or encoded."""
    asks = getattr(lane.comm, "aliases_input", None)
    return asks is not None and bool(asks(lane.process_group))

"""A check whether a collective with one rank moves nothing: its result may be its input."""

from __future__ import annotations

from fullshard.comm import GatherConfig, ReduceConfig

__all__ = ["is_alone"]


def is_alone(config: GatherConfig | ReduceConfig) -> bool:
    """Return whether the config's collective reports that nothing must be moved or encoded."""
    asks = getattr(config.comm, "aliases_input", None)
    return asks is not None and bool(asks(config.process_group))

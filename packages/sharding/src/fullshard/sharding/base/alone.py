"""Whether a collective of one rank moves nothing: its result may be its input, as it lies."""

from __future__ import annotations

from fullshard.comm import GatherConfig, ReduceConfig

__all__ = ["is_alone"]


def is_alone(config: GatherConfig | ReduceConfig) -> bool:
    """Tells whether the config's collective says that nothing is to be moved or encoded."""
    asks = getattr(config.comm, "aliases_input", None)
    return asks is not None and bool(asks(config.process_group))

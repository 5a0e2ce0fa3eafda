"""The shards of some parameters as a gather sends them, checked once and kept for the next one.

Owns that list while the shards are the parameters' own memory: what was copied in or cast may move.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch

from fullshard.comm import GatherConfig, Layout
from fullshard.comm.collectives.gather import OwnShards
from fullshard.sharding.params.param import FSDPParam

__all__ = ["GatherInputs"]


class GatherInputs:
    """What gathers of one layout send."""

    def __init__(self, params: Sequence[FSDPParam], layout: Layout) -> None:
        """Takes the parameters in the order of ``layout``."""
        self._params = tuple(params)
        self._layout = layout
        self._to_travel = [param.sharding.to_travel for param in params]
        self._staged: Sequence[torch.Tensor] = ()  # the shards of which the next are made
        self._kept: OwnShards | None = None

    def of(self, staged: Sequence[torch.Tensor], config: GatherConfig) -> OwnShards:
        """Returns what travels of ``staged``, the shards as the copy-in stream sees them."""
        kept = self._kept
        if kept is not None and all(map(is_, staged, self._staged)):
            return kept
        travelling = [
            to_travel(shard) for to_travel, shard in zip(self._to_travel, staged, strict=True)
        ]
        own = OwnShards(travelling, self._layout, config)
        if all(shard is param.shard for shard, param in zip(staged, self._params, strict=True)):
            self._staged, self._kept = tuple(staged), own
        return own

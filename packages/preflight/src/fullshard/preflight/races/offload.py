"""Offload on a simulated accelerator, where the device's memory and the host's are both the CPU's.

Owns the copies between them, which the CPU's own policy leaves out. The waits are those of the real
policy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fullshard.policies import CPUOffloadPolicy
from fullshard.preflight.races.watch import keep_on_host

__all__ = ["SimulatedOffloadPolicy"]


@dataclass(frozen=True)
class SimulatedOffloadPolicy(CPUOffloadPolicy):
    """``CPUOffloadPolicy`` for programs whose races are watched: shards live on the host."""

    def store(self, shard: torch.Tensor) -> torch.Tensor:
        """Return ``shard`` as memory of the host, which works without streams."""
        if not self.parameters:
            return shard
        return keep_on_host(shard)

    def stage_in(self, shard: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a copy of ``shard`` on the device, made on the current stream."""
        return torch.empty_like(shard).copy_(shard, non_blocking=True) if self.parameters else shard

    def stage_out(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``gradient`` on the host, on its way there."""
        if not self.parameters:
            return gradient
        return keep_on_host(torch.empty_like(gradient)).copy_(gradient, non_blocking=True)

"""Offload: where shards, their gradients and so the optimizer's state live.

Owns the answers to sharding's question of staging. ``OffloadPolicy`` is the identity, under
torch's name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["CPUOffloadPolicy", "OffloadPolicy"]


@dataclass(frozen=True)
class OffloadPolicy:
    """No offload: shards and gradients stay where the model computes."""

    def home(self, device: torch.device) -> torch.device:
        """Returns ``device``."""
        return device

    def store(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns ``shard``."""
        return shard

    def stage_in(self, shard: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns ``shard``."""
        return shard

    def stage_out(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns ``gradient``."""
        return gradient


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, gradients and optimizer state on the CPU.

    A shard is copied to the device before its gather, its reduced gradient back after.

    Attributes:
        pin_memory: keep shards in page-locked memory, from which copies are faster; it cannot be
            swapped out. Without an accelerator there is nothing to pin for.
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        """Checks the field.

        Raises:
            TypeError: if ``pin_memory`` is not a bool.
        """
        if not isinstance(self.pin_memory, bool):
            raise TypeError(f"pin_memory is {self.pin_memory!r}; pass True or False")

    def home(self, device: torch.device) -> torch.device:
        """Returns the CPU."""
        return torch.device("cpu")

    def store(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns ``shard`` in page-locked memory if asked for and an accelerator is there."""
        pins = self.pin_memory and shard.device.type == "cpu" and torch.accelerator.is_available()
        return shard.pin_memory() if pins else shard

    def stage_in(self, shard: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns a copy of ``shard`` on ``device``, made on the current stream."""
        return shard.to(device, non_blocking=True)

    def stage_out(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns ``gradient`` on the CPU, complete: the optimizer reads it there at once."""
        return gradient.to("cpu")

"""Offload: where shards, their gradients and the optimizer's state live, and where it steps.

Owns the answers to sharding's question of offload. ``OffloadPolicy`` is the identity, under
torch's name. A gradient lives with its parameter, since torch keeps both on one device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fullshard.policies.elsewhere import require_steps_elsewhere
from fullshard.sharding import NoOffload, OffloadToCPU
from fullshard.sharding.spi import require_bool

__all__ = ["CPUOffloadPolicy", "OffloadPolicy"]


@dataclass(frozen=True)
class OffloadPolicy(NoOffload):
    """No offload: shards, gradients and optimizer state stay where the model computes."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadToCPU, OffloadPolicy):
    """Shards with their gradients, and optimizer state, on the CPU, or one of the two.

    By default both, as in torch: a shard is copied to the device before its gather, its
    reduced gradient back after, and the optimizer steps on the CPU. The optimizer always steps
    where its state lives, so the state, the largest of the three, never travels.

    | parameters | optimizer_state | `.parameters()` and `.grad` live | steps on |
    |---|---|---|---|
    | True | True | on the CPU | the CPU |
    | True | False | on the CPU | the device; both are copied there and back |
    | False | True | on the device | the CPU; both are copied there and back |
    | False | False | on the device | the device: no offload |

    Attributes:
        pin_memory: keep what is on the CPU in page-locked memory, from which copies are faster and
            do not block the host; it cannot be swapped out. Without an accelerator there is
            nothing to pin for.
        parameters: keep shards and reduced gradients on the CPU, and accumulate gradients there.
        optimizer_state: keep the optimizer's state on the CPU, and step there.
    """

    parameters: bool = field(default=True, kw_only=True)
    optimizer_state: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            TypeError: if one is not a bool.
            ImportError: if parameters and state live apart, and fullshard-optim is not installed.
        """
        for name in ("pin_memory", "parameters", "optimizer_state"):
            require_bool(name, getattr(self, name))
        if self.parameters is not self.optimizer_state:
            require_steps_elsewhere("CPUOffloadPolicy with one of its two flags")

    @property
    def stages_out_nothing(self) -> bool:
        """Whether gradients stay where the model computes, as parameters do."""
        return not self.parameters

    def home(self, device: torch.device) -> torch.device:
        """Return the CPU, or ``device`` if parameters stay there."""
        return super().home(device) if self.parameters else device

    def store(self, shard: torch.Tensor) -> torch.Tensor:
        """Return ``shard``, if it lives on the CPU in page-locked memory where that helps."""
        return super().store(shard) if self.parameters else shard

    def stage_out(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return ``gradient`` where parameters live; on its way there if memory is pinned."""
        return super().stage_out(gradient) if self.parameters else gradient

    def stage_step(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return ``tensor`` where the state lives; on its way there if memory is pinned."""
        if self.optimizer_state:
            return super().stage_step(tensor, device)
        return tensor.to(device, non_blocking=True)

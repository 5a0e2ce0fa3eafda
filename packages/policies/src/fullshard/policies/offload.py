"""Offload: where shards, their gradients and the optimizer's state live, and where it steps.

Owns the answers to sharding's question of offload. ``OffloadPolicy`` is the identity, under
torch's name. It refuses the one thing that cannot be: a gradient away from its parameter.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fullshard.sharding import NoOffload, OffloadToCPU

__all__ = ["CPUOffloadPolicy", "OffloadPolicy"]


@dataclass(frozen=True)
class OffloadPolicy(NoOffload):
    """No offload: shards, gradients and optimizer state stay where the model computes."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadToCPU, OffloadPolicy):
    """Shards, gradients and optimizer state on the CPU, or some of them.

    By default all three, as in torch: a shard is copied to the device before its gather, its
    reduced gradient back after, and the optimizer steps on the CPU. The optimizer always steps
    where its state lives, so the state, the largest of the three, never travels.

    | parameters | gradients | optimizer_state | `.parameters()` and `.grad` live | steps on |
    |---|---|---|---|---|
    | True | True | True | on the CPU | the CPU |
    | True | True | False | on the CPU | the device; both are copied there and back |
    | False | True | True | on the CPU; the device has a copy of the shards | the CPU |
    | False | True | False | the same | the device; both are copied there and back |
    | False | False | True | on the device | the CPU; both are copied there and back |
    | False | False | False | on the device | the device: no offload |
    | True | False | any | refused: torch keeps `.grad` on its parameter's device | |

    Attributes:
        pin_memory: keep what is on the CPU in page-locked memory, from which copies are faster and
            do not block the host; it cannot be swapped out. Without an accelerator there is
            nothing to pin for.
        parameters: keep no copy of the shards on the device between uses; False: keep one there,
            renewed when the parameters have changed, so that a step copies them once however often
            they are gathered.
        gradients: keep reduced gradients on the CPU, and accumulate them there.
        optimizer_state: keep the optimizer's state on the CPU, and step there.
    """

    parameters: bool = field(default=True, kw_only=True)
    gradients: bool = field(default=True, kw_only=True)
    optimizer_state: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        """Checks the fields.

        Raises:
            TypeError: if one is not a bool.
            ValueError: if parameters are to leave the device and gradients are not.
        """
        for name in ("pin_memory", "parameters", "gradients", "optimizer_state"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"{name} is {value!r}; pass True or False")
        if self.parameters and not self.gradients:
            raise ValueError(
                "parameters=True with gradients=False would leave a gradient on the device without "
                "its parameter, and torch keeps .grad on its parameter's device; pass "
                "gradients=True too, or parameters=False"
            )

    def home(self, device: torch.device) -> torch.device:
        """Returns the CPU, or ``device`` if gradients stay there."""
        return super().home(device) if self.gradients else device

    def store(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns ``shard``, if it lives on the CPU in page-locked memory where that helps."""
        return super().store(shard) if self.gradients else shard

    def keeps_staged(self) -> bool:
        """Returns whether the shards stay on the device while their home is the CPU."""
        return self.gradients and not self.parameters

    def stage_out(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns ``gradient`` where parameters live; on its way there if memory is pinned."""
        return super().stage_out(gradient) if self.gradients else gradient

    def stage_step(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns ``tensor`` where the state lives; on its way there if memory is pinned."""
        if self.optimizer_state:
            return super().stage_step(tensor, device)
        return tensor.to(device, non_blocking=True)

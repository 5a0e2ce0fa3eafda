"""Small modules that tests of several folders use, each with what it is for."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["Branches", "Residual"]


class Residual(nn.Module):
    """Two layers around a nonlinearity, and a residual."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape: ``[..., width]``, in and out."""
        down: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return x + down


class Branches(nn.Module):
    """A call takes one branch, so that gradients may exist on some ranks only; one is for none."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs)
        self.unused = nn.Linear(inputs, outputs)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        """Shape: ``[..., inputs]`` to ``[..., outputs]``."""
        out: torch.Tensor = self.left(x) if left else self.right(x)
        return out

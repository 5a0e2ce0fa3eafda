"""Small modules that tests of several folders use, and short ways to make one for a single test."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

__all__ = ["Assembled", "Branches", "Residual", "in_turn"]


def in_turn(**parts: nn.Module) -> Any:
    """The parts under their names, each called with what the one before it returned."""
    return nn.Sequential(OrderedDict(parts))


class Assembled(nn.Module):
    """Modules, parameters and other attributes by name, and a function that is the forward.

    Args:
        run: gets the module, then what the module is called with.
        parts: the attributes, in the order in which modules and parameters are registered.
    """

    def __init__(self, run: Callable[..., Any], /, **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def forward(self, *args: Any, **named: Any) -> Any:
        """What `run` returns."""
        return self.run(self, *args, **named)


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

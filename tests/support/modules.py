"""Small modules that tests of several folders use, and short ways to make one for a single test."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn


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
    """Two layers around a nonlinearity, and a residual: ``x + scale * down(tanh(up(norm(x))))``.

    Args:
        width: of what comes in and goes out.
        hidden: between the layers.
        norm: whether what comes in is normalised first.
        bias: whether the second layer has a bias.
        scale: what the parameter ``scale`` begins with; None: there is none.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        norm: bool = False,
        bias: bool = True,
        scale: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        if norm:
            self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=bias)
        if scale is not None:
            self.scale = nn.Parameter(scale)
        self._is_normed, self._is_scaled = norm, scale is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape: ``[..., width]``, in and out."""
        down: torch.Tensor = self.down(torch.tanh(self.up(self.norm(x) if self._is_normed else x)))
        return x + (self.scale * down if self._is_scaled else down)


class MLPBlock(nn.Module):
    """A norm and two linear layers, added to the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape: ``[..., width]``, in and out."""
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


class Stack(nn.Module):
    """Blocks in a list, one after the other, between a stem and a head where there are such."""

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        *,
        stem: nn.Module | None = None,
        head: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.stem: Any = stem
        self.blocks = nn.ModuleList(blocks)
        self.head: Any = head

    def forward(self, x: torch.Tensor) -> Any:
        """What the last of them returns."""
        x = x if self.stem is None else self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


class Held(nn.Module):
    """Tensors as parameters, under names that may have dots; it is never called."""

    def __init__(self, values: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, value in values.items():
            holder: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in holder._modules:
                    holder.add_module(part, nn.Module())
                holder = holder.get_submodule(part)
            holder.register_parameter(last, nn.Parameter(value))


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

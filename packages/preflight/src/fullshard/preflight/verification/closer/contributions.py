"""Contributions of each backward of the reference to a gradient: sizes, and tensors on request.

A backward is one micro-batch of one rank's batch, so the kept gradients show the parts of the
sharded model's gradient.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

__all__ = ["Contribution", "Contributions"]


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """The gradient of one backward.

    Attributes:
        rank: whose batch it was.
        number: which backward on that batch, from 0.
        gradient: what it added, before it is divided by the number of ranks; in 64 bits.
    """

    rank: int
    number: int
    gradient: torch.Tensor


class Contributions:
    """A recorder of the additions to the gradients of one step.

    Attributes:
        kept: the added gradients in order, by parameter name, for parameters to be kept.
        rank: whose batch the reference has now.
    """

    def __init__(self, world_size: int, keeps: Collection[str] = ()) -> None:
        """Start a step. ``keeps``: parameters whose contributions are kept."""
        self.kept: dict[str, list[Contribution]] = {name: [] for name in keeps}
        self.rank = 0
        self._norms: dict[str, float] = {}
        self._world = world_size

    def follow(self, named: dict[str, nn.Parameter]) -> list[torch.utils.hooks.RemovableHandle]:
        """Register hooks on the parameters of a reference, by their names in the model."""
        return [
            param.register_hook(partial(self._add, name))
            for name, param in named.items()
            if param.requires_grad
        ]

    @property
    def sizes(self) -> dict[str, float]:
        """By name, the norms of what was added, as parts of the mean over ranks."""
        return {name: norm / self._world for name, norm in self._norms.items()}

    def _add(self, name: str, gradient: torch.Tensor) -> None:
        self._norms[name] = self._norms.get(name, 0.0) + float(gradient.detach().double().norm())
        if name in self.kept:
            before = self.kept[name]
            number = sum(each.rank == self.rank for each in before)
            came = gradient.detach().to("cpu", torch.float64)
            before.append(Contribution(rank=self.rank, number=number, gradient=came))

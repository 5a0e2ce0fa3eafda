"""The state from which both computations of ``twice`` begin.

Owns buffers, gradients and Python's random numbers: saved before the first computation, and
restored before the second. ``torch.random.fork_rng`` restores the random numbers of torch. A plain
tensor that a module changes is unknown here.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import torch
from torch import nn

__all__ = ["StartingState"]


class StartingState:
    """What a computation of gradients changes, as it was before; gradients are removed.

    Args:
        model: whose buffers are saved.
        params: whose gradients are taken away until ``restore``.
    """

    def __init__(self, model: nn.Module, params: Iterable[torch.Tensor]) -> None:
        self._random = random.getstate()
        self._held = [(module, dict(module._buffers.items())) for module in model.modules()]
        self._values: dict[int, torch.Tensor] = {}  # by id, as several modules may hold a buffer
        for _, buffers in self._held:
            for buffer in buffers.values():
                if buffer is not None and id(buffer) not in self._values:
                    self._values[id(buffer)] = buffer.detach().clone()
        self._gradients = [(param, param.grad) for param in params]
        for param, _ in self._gradients:
            param.grad = None

    @torch.no_grad()
    def restore(self) -> None:
        """Restore buffers (in place where that is possible), gradients and random numbers."""
        random.setstate(self._random)
        for param, gradient in self._gradients:
            param.grad = gradient
        for module, buffers in self._held:
            for name in [name for name in module._buffers if name not in buffers]:
                del module._buffers[name]
            for name, buffer in buffers.items():
                if module._buffers[name] is not buffer:
                    module._buffers[name] = buffer
                if buffer is not None and not _repeats_elements(buffer):
                    buffer.copy_(self._values[id(buffer)])


def _repeats_elements(buffer: torch.Tensor) -> bool:
    """Return whether places of ``buffer`` share memory, as after ``expand``: none is written to."""
    if buffer.layout is not torch.strided:
        return False
    return any(n > 1 and step == 0 for n, step in zip(buffer.shape, buffer.stride(), strict=True))

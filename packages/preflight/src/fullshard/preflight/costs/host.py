"""The host's own time: what modules and autograd add to an operation, and the engine to a group.

Measured on operations of one element, which compute nothing, in a world where nothing moves. Owns
the small models for it.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.comm import EventKind, EventLog, observe
from fullshard.preflight.compat import DispatchMode, lonely_group
from fullshard.preflight.costs.timing import Caches
from fullshard.sharding import fully_shard

__all__ = ["HostTime", "time_host"]

_GROUPS = 8
_UNTIMED, _TIMED = 5, 25


@dataclass(frozen=True, slots=True)
class HostTime:
    """Host time in addition to operations.

    Attributes:
        launch: seconds of modules, autograd and optimizer for each operation.
        unshard: seconds of the engine for each time that a group is gathered: hooks, states, its
            reduction, and the optimizer's way through sharded parameters.
    """

    launch: float
    unshard: float


class _Operations(DispatchMode):
    """Keeps operations of torch's as they were called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        if func.namespace == "aten":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Touches:
    """Touches other memory in a step, as its operations do, and adds up the time of that."""

    def __init__(self, caches: Caches, nbytes: int) -> None:
        self.caches, self.nbytes, self.seconds = caches, nbytes, 0.0

    def touch(self) -> None:
        start = time.perf_counter()
        self.caches.touch(self.nbytes)
        self.seconds += time.perf_counter() - start


class _Touch(torch.autograd.Function):
    """The identity, which touches other memory in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, touches: _Touches) -> torch.Tensor:
        ctx.touches = touches
        touches.touch()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.touches.touch()
        return gradients[0], None


class _Unit(nn.Module):
    """Linear layers of one element, with other memory touched after each."""

    def __init__(self, parameters: int, touches: _Touches, *, computes: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(parameters))
        self._touches, self._computes = touches, computes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        touch: Any = _Touch.apply
        for layer in self.layers:
            x = touch(layer(x) if self._computes else x, self._touches)
        return x


class _Trained:
    """Units, and a step of them."""

    def __init__(
        self, parameters: int, touches: _Touches, *, sharded: bool = False, computes: bool = True
    ) -> None:
        units = [_Unit(parameters, touches, computes=computes) for _ in range(_GROUPS)]
        self._model = nn.Sequential(*units, nn.Linear(1, 1, bias=False))
        if sharded:
            for unit in units:
                fully_shard(unit)
            fully_shard(self._model)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), fused=True)
        self._input, self._touches = torch.ones(1, 1), touches

    def step(self) -> None:
        self._model(self._input).sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def seconds(self) -> float:
        """Median seconds of a step, without the time to touch memory."""
        found = []
        for _ in range(_UNTIMED + _TIMED):
            self._touches.seconds = 0.0
            start = time.perf_counter()
            self.step()
            found.append(time.perf_counter() - start - self._touches.seconds)
        return statistics.median(found[_UNTIMED:])

    def operations(self) -> list[tuple[Any, Any, Any]]:
        """The operations of a step."""
        before, self._touches.nbytes = self._touches.nbytes, 0
        with _Operations() as seen:
            self.step()
        self._touches.nbytes = before
        return seen.calls


@torch.no_grad()
def _alone(calls: list[tuple[Any, Any, Any]]) -> float:
    """Seconds of all these operations, each called by itself."""
    total = 0.0
    for func, args, kwargs in calls:
        found = []
        for _ in range(_UNTIMED + _TIMED):
            start = time.perf_counter()
            func(*args, **kwargs)
            found.append(time.perf_counter() - start)
        total += statistics.median(found[_UNTIMED:])
    return total


def time_host(parameters: int, touched: int, ranks: int) -> HostTime:
    """The host's time in a step whose operations touch so many bytes each.

    To be called outside of any world.

    Args:
        parameters: of a group.
        touched: bytes of other memory that are touched between operations; what the host needs has
            left the nearest caches then.
        ranks: of the world, in which nothing moves.
    """
    touches = _Touches(Caches(), touched)
    plain = _Trained(parameters, touches)
    whole, calls = plain.seconds(), plain.operations()
    idle = _Trained(parameters, touches, computes=False)
    nothing, others = idle.seconds(), idle.operations()
    launch = (whole - nothing - _alone(calls) + _alone(others)) / (len(calls) - len(others))
    with lonely_group(ranks):
        trained = _Trained(parameters, touches, sharded=True)
        seconds, count = trained.seconds(), len(trained.operations())
        log = EventLog()
        with observe(log):
            trained.step()
    engine = seconds - whole - (count - len(calls)) * (whole - nothing) / (len(calls) - len(others))
    return HostTime(max(0.0, launch), max(0.0, engine) / len(log.of(EventKind.UNSHARD)))

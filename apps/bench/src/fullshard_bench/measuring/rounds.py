"""Timed steps in rounds: in each, every contestant makes one step.

Owns the clock and the order. The order rotates by one place each round, so that a contestant
follows every other one, and the garbage collector runs between rounds only.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from fullshard_bench.contestants.training import Outcome, Trainee
from fullshard_bench.launching.ranks import Ranks
from fullshard_bench.launching.turns import Turn

__all__ = ["Batches", "Racer", "rounds", "synchronize", "timed_step"]

Batches = Sequence[Sequence[torch.Tensor]]


@dataclass(kw_only=True)
class Racer:
    """A contestant in the rounds, and its times on this rank in milliseconds."""

    name: str
    trainee: Trainee
    step_ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    last: Outcome | None = None


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was asked."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def timed_step(racer: Racer, batch: Sequence[torch.Tensor], device: torch.device) -> None:
    """A step, and its times."""
    start = time.perf_counter()
    racer.last = racer.trainee.step(batch)
    queued = time.perf_counter()
    synchronize(device)
    racer.step_ms.append((time.perf_counter() - start) * 1e3)
    racer.host_ms.append((queued - start) * 1e3)


def rounds(
    racers: Sequence[Racer],
    batches: Batches,
    ranks: Ranks,
    device: torch.device,
    steps: int,
    turn: Turn,
) -> Iterator[int]:
    """Let every racer make `steps` steps, each in a `turn`; yields how many rounds are done."""
    with _collecting_between() as collect:
        for number in range(steps):
            first = number % max(1, len(racers))
            with turn.round(number):
                for racer in (*racers[first:], *racers[:first]):
                    with turn:
                        synchronize(device)
                        ranks.meet()
                        timed_step(racer, batches[number % len(batches)], device)
                with turn:
                    collect()
            yield number + 1


@contextmanager
def _collecting_between() -> Iterator[Callable[[], None]]:
    """A context in which garbage is collected when the function is called, and only then."""
    gc.collect()
    gc.freeze()  # what is there now need not be looked at each time
    gc.disable()
    try:
        yield lambda: (gc.collect(), None)[1]
    finally:
        gc.enable()
        gc.unfreeze()

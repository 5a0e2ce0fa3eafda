"""Random numbers of two runs in one process, separate for each run.

The generators are torch's, on the CPU and the current accelerator, Python's, and numpy's if it is
imported.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fullshard.preflight.machine import usable_device
from fullshard.preflight.verification.program import Seeds

__all__ = ["Draws", "State", "draws_restored"]


@dataclass(frozen=True, kw_only=True)
class State:
    """Where all the generators are; ``card`` and ``numpy`` are None where there is none."""

    cpu: torch.Tensor
    python: Any
    numpy: Any
    card: torch.Tensor | None


@contextmanager
def draws_restored() -> Iterator[None]:
    """After the ``with`` block, random numbers go on as if it had not been."""
    draws = Draws(usable_device())
    own = draws.state()
    try:
        yield
    finally:
        draws.restore(own)


class Draws:
    """The generators of the sharded run, and a second state of them for the reference."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        """Change nothing yet; ``device`` is where the models compute."""
        self._start = seed
        self._card = None if device.type == "cpu" else torch.get_device_module(device)
        self._device = device
        self._aside = self.state()

    def seed(self) -> None:
        """Seeds both runs alike, on every rank, as most programs do."""
        _seed(self._start)
        self._aside = self.state()

    def state(self) -> State:
        """Return where the generators are."""
        numpy = sys.modules.get("numpy")
        return State(
            cpu=torch.get_rng_state(),
            python=random.getstate(),
            numpy=None if numpy is None else numpy.random.get_state(),
            card=None if self._card is None else self._card.get_rng_state(self._device),
        )

    def restore(self, state: State) -> None:
        """Set the generators back to ``state``."""
        torch.set_rng_state(state.cpu)
        random.setstate(state.python)
        if state.numpy is not None:
            sys.modules["numpy"].random.set_state(state.numpy)
        if self._card is not None:
            self._card.set_rng_state(state.card, self._device)

    def align(self, seeds: Seeds, step: int, rank: int) -> None:
        """Seeds the generators for a rank's batch of a step, where ``seeds`` asks for it."""
        if seeds is not Seeds.ONCE:
            own = rank if seeds is Seeds.BY_RANK else 0
            _seed((self._start + 1) * 100_003 + step * dist.get_world_size() + own)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside the ``with`` block the reference draws; after it the sharded run continues."""
        own = self.state()
        self.restore(self._aside)
        try:
            yield
        finally:
            self._aside = self.state()
            self.restore(own)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)

"""Random numbers of two runs in one process, each of which goes on as if it were alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["Draws", "draws_restored"]


@contextmanager
def draws_restored() -> Iterator[None]:
    """After the ``with`` block, torch's and Python's random numbers go on as if it had not been."""
    card = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices = [] if card is None else [torch.accelerator.current_device_index()]
    kind = "cuda" if card is None else card.type
    own = random.getstate()
    try:
        with torch.random.fork_rng(devices=devices, device_type=kind):
            yield
    finally:
        random.setstate(own)


class Draws:
    """The generators of the sharded run, and a second state of them for the reference."""

    def __init__(self, seed: int, device: torch.device) -> None:
        """Seeds both runs alike, on every rank, as most programs do."""
        self._seed = seed
        self._card = None if device.type == "cpu" else torch.get_device_module(device)
        self._device = device
        torch.manual_seed(seed)
        random.seed(seed)
        self._aside = self._state()

    def _state(self) -> tuple[torch.Tensor, object, torch.Tensor | None]:
        card = None if self._card is None else self._card.get_rng_state(self._device)
        return torch.get_rng_state(), random.getstate(), card

    def _restore(self, state: tuple[torch.Tensor, object, torch.Tensor | None]) -> None:
        torch.set_rng_state(state[0])
        random.setstate(state[1])  # type: ignore[arg-type]
        if self._card is not None:
            self._card.set_rng_state(state[2], self._device)

    def align(self, step: int, rank: int, world_size: int) -> None:
        """Seeds the generators by step and rank."""
        seed = (self._seed + 1) * 100_003 + step * world_size + rank
        torch.manual_seed(seed)
        random.seed(seed)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside the ``with`` block the reference draws; after it the sharded run goes on."""
        own = self._state()
        self._restore(self._aside)
        try:
            yield
        finally:
            self._aside = self._state()
            self._restore(own)

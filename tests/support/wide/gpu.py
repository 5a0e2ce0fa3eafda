"""One card: meshes on it, whatever the process group, and work that ends late on purpose."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from support.card import CARD, TRANSPORT, card

__all__ = [
    "CARD",
    "card",
    "card_mesh",
    "card_world",
    "late",
    "synchronisations",
    "without_synchronisation",
]

_LATE = 50_000_000  # device cycles: some 30 ms, in which the host is long past what it queued


def card_mesh() -> DeviceMesh:
    """A 1-D mesh of all ranks of the default group, each on the one card."""
    card.init()
    card.set_device(CARD)
    group = dist.group.WORLD
    assert group is not None
    # Not init_device_mesh: it would give rank 1 a card of its own.
    return DeviceMesh.from_group(group, CARD.type)


@contextmanager
def card_world(folder: Path) -> Iterator[DeviceMesh]:
    """A world of one rank over the card's own backend."""
    card.set_device(CARD)
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group(TRANSPORT, store=store, rank=0, world_size=1, device_id=CARD)
    try:
        yield card_mesh()
    finally:
        dist.destroy_process_group()


def late() -> None:
    """Keep the current stream busy, so that whoever does not wait for it reads too early."""
    card._sleep(_LATE)


@contextmanager
def without_synchronisation() -> Iterator[None]:
    """A context in which an operation that makes the host wait for the device raises."""
    _set_debug_mode("error")
    try:
        yield
    finally:
        _set_debug_mode("default")


@contextmanager
def synchronisations() -> Iterator[list[str]]:
    """The warnings of operations, in the context, that made the host wait for the device."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _set_debug_mode("warn")
        try:
            yield found
        finally:
            _set_debug_mode("default")
    found += [text for each in caught if "called a synchronizing" in (text := str(each.message))]


def _set_debug_mode(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says each time that the mode is a prototype
        card.set_sync_debug_mode(mode)

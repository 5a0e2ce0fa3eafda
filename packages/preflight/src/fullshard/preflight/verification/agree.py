"""One rank's error raised on all of them, before any can wait for a rank that has left."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import Any, TypeVar

import torch.distributed as dist

from fullshard.preflight.compat import default_store

__all__ = ["everyones", "from_first", "jointly", "together"]

_T = TypeVar("_T")

PATIENCE = 20.0
"""Seconds that a rank with an error gives the others to come to its end of the same part."""

_parts = count()  # all ranks pass the same parts in the same order


def everyones(value: Any) -> list[Any]:
    """Returns what each rank passed, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def from_first(value: _T, rank: int = 0) -> _T:
    """Returns what rank 0 passed, or ``rank``."""
    box = [value]
    dist.broadcast_object_list(box, src=rank)
    return box[0]


def together(run: Callable[[], _T]) -> _T:
    """Returns ``run()``, in which no rank may communicate.

    Raises:
        Exception: what ``run`` raised here; or a ``RuntimeError`` that names the rank where it did.
    """
    failure: Exception | None = None
    value: Any = None
    try:
        value = run()
    except Exception as error:
        failure = error
    _raise_any(failure)
    return value  # type: ignore[no-any-return]


def jointly(run: Callable[[], _T]) -> _T:
    """Returns ``run()``, in which ranks may communicate with each other.

    A rank that raised waits for the others. If they do not come they are in a collective that it
    never joined; then it raises alone. The others' wait ends when its process does: gloo sees the
    closed connection, and they raise with its error; torchrun ends them with other backends.

    Raises:
        Exception: what ``run`` raised here; or a ``RuntimeError`` that names the rank where it did.
    """
    part = _Part(next(_parts))
    failure: Exception | None = None
    value: Any = None
    try:
        value = run()
    except Exception as error:
        failure = error
    earlier = "" if failure is None else part.failure()
    part.end("" if failure is None else f"{type(failure).__name__}: {failure}")
    if earlier:  # this rank's failure came of another's
        raise RuntimeError(earlier) from failure
    if failure is not None and not part.all_come():
        raise failure
    try:
        _raise_any(failure)
    except RuntimeError as error:
        if failure is None and (text := part.failure()):
            raise RuntimeError(text) from error
        raise
    return value  # type: ignore[no-any-return]


def _raise_any(failure: Exception | None) -> None:
    """Raises this rank's failure, or that another had one."""
    said = everyones(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, text in enumerate(said):
        if text is not None:
            raise RuntimeError(f"rank {rank} stopped the verification: {text}")


class _Part:
    """Where the ranks write, beside their collectives, that they ended a part, and with what error.

    It is the store that the process group was made with.
    """

    def __init__(self, number: int) -> None:
        world, self._rank = dist.get_world_size(), dist.get_rank()
        self._store = default_store()
        self._keys = [f"fullshard.preflight/{number}/{rank}" for rank in range(world)]

    def end(self, failure: str) -> None:
        """Writes that this rank ended."""
        self._store.set(self._keys[self._rank], failure)

    def failure(self) -> str:
        """Returns what the first rank with an error wrote; "" if none has."""
        for rank, key in enumerate(self._keys):
            if self._store.check([key]) and (text := self._store.get(key).decode()):
                return f"rank {rank} stopped the verification: {text}"
        return ""

    def all_come(self) -> bool:
        """Waits for all ranks to end; returns whether they did in time."""
        end = time.monotonic() + PATIENCE
        while not self._store.check(self._keys):
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

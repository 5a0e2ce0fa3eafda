"""One rank's error raised on all of them, before any can wait for a rank that has left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

__all__ = ["everyones", "from_first", "together"]

_T = TypeVar("_T")


def everyones(value: Any) -> list[Any]:
    """Returns what each rank passed, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def from_first(value: _T) -> _T:
    """Returns what rank 0 passed."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
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
    said = everyones(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, text in enumerate(said):
        if text is not None:
            raise RuntimeError(f"rank {rank} stopped the verification: {text}")
    return value  # type: ignore[no-any-return]

"""The error of checkpoints in memory, and work whose errors every rank raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from fullshard.checkpoint.agreement import format_error

__all__ = ["MemoryCheckpointError", "together"]

T = TypeVar("T")


class MemoryCheckpointError(RuntimeError):
    """A checkpoint in memory was not written, not read, or has no room. Raised on every rank.

    Attributes:
        lost: the global numbers of ranks that cannot be reached any more.
    """

    def __init__(self, text: str, *, lost: Sequence[int] = ()) -> None:
        """Take what went wrong."""
        super().__init__(text)
        self.lost = tuple(lost)


def together(group: dist.ProcessGroup | None, what: str, call: Callable[[], T]) -> list[T]:
    """Return what ``call`` returns on each rank; every rank calls this.

    Args:
        group: the ranks; None: this one alone.
        what: begins the text of an error, such as "the memory of run a".
        call: may raise on any rank.

    Raises:
        MemoryCheckpointError: on every rank, with the errors of all.
    """
    caught: Exception | None = None
    mine: tuple[T | None, str] = (None, "")
    try:
        mine = (call(), "")
    except Exception as error:
        caught, mine = error, (None, format_error(error))
    told: list[tuple[T | None, str]] = [mine]
    if group is not None:
        told = [mine] * group.size()
        dist.all_gather_object(told, mine, group=group)
    errors = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(told) if text]
    if errors:
        raise MemoryCheckpointError(f"{what}: {'; '.join(errors)}") from caught
    return [value for value, _ in told]  # type: ignore[misc]  # None only where T is

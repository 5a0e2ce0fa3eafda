"""The exchange of a save: the first rank hears all others and answers, and names ranks it lost.

``Meeting`` sends objects from rank to rank. A gloo collective in which a rank is lost fails on some
ranks with the address of a socket, and leaves others waiting for ranks that raised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist

__all__ = ["LostRanksError", "Meeting"]

T = TypeVar("T")
U = TypeVar("U")


class LostRanksError(RuntimeError):
    """Ranks cannot be reached any more.

    Attributes:
        ranks: their global numbers.
        first: whether it is the one that answers; then this rank does not know what it did.
    """

    def __init__(self, ranks: Sequence[int], *, first: bool = False) -> None:
        """Take the ranks."""
        several = len(ranks) > 1
        super().__init__(
            f"{'ranks' if several else 'rank'} {', '.join(map(str, ranks))} "
            f"{'were' if several else 'was'} lost: "
            f"{'their processes' if several else 'its process'} ended, or a connection broke"
        )
        self.ranks = tuple(ranks)
        self.first = first


class Meeting:
    """The ranks of a process group.

    Attributes:
        rank: this one's number in the group; 0 without a group.
        size: how many there are.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Take the group; None: this rank is alone."""
        self._group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()

    def ask(self, mine: T, answer: Callable[[Sequence[T]], U]) -> U:
        """Return what the first rank answers; all ranks call this together.

        Args:
            mine: the message of this rank to the first rank.
            answer: called on the first rank with the messages of all ranks, by rank; must not
                raise.

        Raises:
            LostRanksError: on all ranks that are left, if a rank is lost before it has sent its
                message. Also on a rank that loses the first one.
        """
        if self.rank > 0:
            try:
                self._send(mine, 0)
                lost, found = self._receive(0)
            except RuntimeError as error:
                raise LostRanksError(self._global([0]), first=True) from error
        else:
            lost, found = self._answered(mine, answer)
        if lost:
            raise LostRanksError(self._global(lost))
        told: U = found
        return told

    def _answered(self, mine: T, answer: Callable[[Sequence[T]], U]) -> tuple[list[int], U | None]:
        told, lost = [mine], []
        for rank in range(1, self.size):
            try:
                told.append(self._receive(rank))
            except RuntimeError:
                lost.append(rank)
        found = None if lost else answer(told)
        for rank in range(1, self.size):
            if rank not in lost:
                with suppress(RuntimeError):  # lost since: it is missed when it is to tell more
                    self._send((lost, found), rank)
        return lost, found

    def _send(self, value: Any, to: int) -> None:
        dist.send_object_list([value], group=self._group, group_dst=to)

    def _receive(self, source: int) -> Any:
        found = [None]
        dist.recv_object_list(found, group=self._group, group_src=source)
        return found[0]

    def _global(self, ranks: Sequence[int]) -> list[int]:
        assert self._group is not None, "a rank alone loses none"
        return [dist.get_global_rank(self._group, rank) for rank in ranks]

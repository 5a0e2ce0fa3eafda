"""Which ranks share a host, and which rank of the next host keeps a copy of whose shards."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Hosts"]


class Hosts:
    """The hosts of a job in a ring.

    Attributes:
        names: of the host of each rank.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """Take the name of each rank's host."""
        self.names = tuple(names)
        self._ranks: dict[str, list[int]] = {}
        for rank, name in enumerate(names):
            self._ranks.setdefault(name, []).append(rank)

    def target(self, rank: int) -> int | None:
        """Return the rank of the next host that keeps the shards of ``rank``; None: one host."""
        order = list(self._ranks)
        if len(order) == 1:
            return None
        name = self.names[rank]
        neighbours = self._ranks[order[(order.index(name) + 1) % len(order)]]
        return neighbours[self._ranks[name].index(rank) % len(neighbours)]

    def sources(self, rank: int) -> list[int]:
        """Return the ranks of the previous host whose shards ``rank`` keeps."""
        return [each for each in range(len(self.names)) if self.target(each) == rank]

    def ranks(self, name: str) -> list[int]:
        """Return the ranks of a host."""
        return self._ranks[name]

    def order(self) -> list[str]:
        """Return the names of the hosts, each once."""
        return list(self._ranks)

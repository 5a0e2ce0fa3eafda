"""The shape of a mesh: `4` shards over four ranks, `2x4` replicates twice over four.

Owns the text form and its checks. `fullshard_bench.launching.arena` makes the process groups.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fullshard_bench.errors import BenchError

__all__ = ["MeshShape", "parse_mesh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """How many ranks shard, and how many times that is replicated (1: a 1-D mesh)."""

    shard: int
    replicate: int = 1

    @property
    def ranks(self) -> int:
        """All ranks of the mesh."""
        return self.shard * self.replicate

    @property
    def sizes(self) -> tuple[int, ...]:
        """The mesh's shape as torch takes it."""
        return (self.shard,) if self.replicate == 1 else (self.replicate, self.shard)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the mesh's axes."""
        return ("shard",) if self.replicate == 1 else ("replicate", "shard")

    def __str__(self) -> str:
        """The text that `parse_mesh` reads."""
        return "x".join(str(size) for size in self.sizes)


def parse_mesh(text: str) -> MeshShape:
    """The shape that `text` means.

    Raises:
        BenchError: it is not `N` or `MxN` with positive numbers.
    """
    match = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)", text, re.ASCII)
    if match is None:
        raise BenchError(
            f"mesh {text!r}: must be a number of ranks that shard, such as 4, or replicas x shards,"
            " such as 2x4"
        )
    return MeshShape(shard=int(match[2]), replicate=int(match[1] or 1))

"""Whether all hosts have room for the checkpoints of a run, checked before the first one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fullshard.checkpoint.memory.hosts import Hosts
from fullshard.checkpoint.memory.segments import allocated

__all__ = ["Room", "free_bytes", "missing_room"]

_GIB = 2**30


@dataclass(frozen=True)
class Room:
    """The memory that a rank needs, and the memory of its host.

    Attributes:
        nbytes: of its segment.
        system: a name of the file system of its folder.
        folder: the path.
        free: bytes that are free there.
        old: bytes of old segments there, which the first save removes.
        budget: bytes that its host may use; None: what is free.
    """

    nbytes: int
    system: str
    folder: str
    free: int
    old: int
    budget: int | None


def free_bytes(folder: Path) -> int:
    """Return how many bytes are free in the file system of a folder."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def missing_room(rooms: Sequence[Room], hosts: Hosts, keep: int) -> str:
    """Return what is too little on which host; nothing if there is room on all.

    Args:
        rooms: of each rank.
        hosts: of the ranks.
        keep: how many steps are kept.
    """
    needed = [
        keep * sum(allocated(rooms[each].nbytes) for each in (rank, *hosts.sources(rank)))
        for rank in range(len(rooms))
    ]
    errors = []
    for name in hosts.order():
        ranks = hosts.ranks(name)
        total, budget = sum(needed[rank] for rank in ranks), rooms[ranks[0]].budget
        if budget is not None and total > budget:
            errors.append(f"host {name} needs {_gib(total)}, and its budget is {_gib(budget)}")
    systems: dict[str, list[int]] = {}
    for rank, room in enumerate(rooms):
        systems.setdefault(room.system, []).append(rank)
    for ranks in systems.values():
        total, first = sum(needed[rank] for rank in ranks), rooms[ranks[0]]
        # ranks of one host list one folder: count it once
        folders = {rooms[rank].folder: rooms[rank].old for rank in ranks}
        free = min(rooms[rank].free for rank in ranks) + sum(folders.values())
        if total > free:
            errors.append(
                f"ranks {', '.join(map(str, ranks))} need {_gib(total)} in {first.folder}, and "
                f"{_gib(free)} are free"
            )
    if not errors:
        return ""
    return (
        f"{'; '.join(errors)}. That is for {keep} steps of each rank's own shards, and of those of "
        "the host before; keep fewer, use more hosts, or make the file system larger"
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f} GiB"

"""Finds the newest step whose segments are whole, on whatever hosts they are.

Owns the agreement of all ranks: each looks into the folder of its host; they choose one copy of
each rank's segment, compare its checksum with its manifest, and choose again without the copies
that are damaged.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from fullshard.checkpoint.memory.errors import together
from fullshard.checkpoint.memory.folder import attempts_in, segments_in
from fullshard.checkpoint.memory.reading import SegmentReader
from fullshard.checkpoint.memory.segments import Manifest, checksum, map_segment

__all__ = ["Found", "file_system_of", "find", "host_name"]

_log = logging.getLogger("fullshard.checkpoint")

Key = tuple[str, str]
"""A file: its file system, and its path there."""


@dataclass(frozen=True)
class Found:
    """A whole step.

    Attributes:
        save: token of the attempt that saved it, and number of the save.
        step: after which it was saved.
        reader: of its segments.
    """

    save: tuple[str, int]
    step: int
    reader: SegmentReader


def file_system_of(folder: Path) -> str:
    """Return a name of the file system of a folder, which no other host has."""
    return f"{host_name()}:{os.stat(folder).st_dev}"


def host_name() -> str:
    """Return a name of this host, which others do not have even if the system's names are equal."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return socket.gethostname()
    return f"{socket.gethostname()}-{boot}"


def find(group: dist.ProcessGroup | None, run: Path, what: str) -> Found | None:
    """Return the last save of which there is a whole segment of each rank that saved.

    Every rank calls this and gets an equal answer. Saves of the newest attempt come first.

    Args:
        group: the ranks; None: this one.
        run: the folder of the run on this host.
        what: begins the text of an error.
    """
    rank = 0 if group is None else group.rank()
    mine: dict[Key, tuple[Path, Manifest]] = {}

    def look() -> dict[Key, Manifest]:
        system = file_system_of(run)
        for attempt in attempts_in(run):
            for path, manifest in segments_in(attempt):
                mine[(system, str(path))] = (path, manifest)
        return {key: replace(manifest, entries=()) for key, (_, manifest) in mine.items()}

    told = together(group, what, look)
    copies = {key: manifest for each in told for key, manifest in each.items()}
    holders = {key: [r for r, each in enumerate(told) if key in each] for key in copies}
    while True:
        chosen, mapped = _newest(copies), dict[int, torch.Tensor]()
        if chosen is None:
            return None
        readers = {saved: _one_of(holders[key], saved) for saved, key in chosen.items()}

        def damaged(
            chosen: Mapping[int, Key] = chosen,
            readers: Mapping[int, int] = readers,
            mapped: dict[int, torch.Tensor] = mapped,
        ) -> list[Key]:
            own = {saved: key for saved, key in chosen.items() if readers[saved] == rank}
            contents = {saved: _whole(*mine[key]) for saved, key in own.items()}
            mapped.update({saved: each for saved, each in contents.items() if each is not None})
            return [key for saved, key in own.items() if contents[saved] is None]

        bad = [key for each in together(group, what, damaged) for key in each]
        for key in bad:
            if rank == 0:
                _log.warning(
                    "the copy of rank %d's shards of step %d in %s on %s is damaged and not used",
                    *(copies[key].rank, copies[key].step, key[1], key[0]),
                )
            del copies[key]
        if not bad:
            break
    own = {s: mine[key][1].entries for s, key in chosen.items() if readers[s] == rank}
    entries = {s: e for each in together(group, what, lambda: own) for s, e in each.items()}
    here = {saved: mine[key][0] for saved, key in chosen.items() if key in mine}
    newest = copies[chosen[0]]
    return Found(
        (newest.token, newest.number),
        newest.step,
        SegmentReader(group, entries, here, readers, mapped),
    )


def _one_of(holders: Sequence[int], saved: int) -> int:
    return saved if saved in holders else holders[saved % len(holders)]


def _newest(copies: Mapping[Key, Manifest]) -> dict[int, Key] | None:
    """Return which copy to take of each rank's shards of the newest whole step; None: no step."""
    saves: dict[tuple[int, int, str, int], dict[int, Key]] = {}
    for key, each in sorted(copies.items(), key=lambda item: _preference(*item)):
        at = (each.attempt, each.number, each.token, each.ranks)
        saves.setdefault(at, {}).setdefault(each.rank, key)
    for at in sorted(saves, reverse=True):
        if len(saves[at]) == at[-1]:
            return saves[at]
    return None


def _preference(key: Key, manifest: Manifest) -> tuple[bool, Key]:
    """Sort copies: what a rank saved itself comes before what its neighbour keeps."""
    return (not key[1].endswith(".own"), key)


def _whole(path: Path, manifest: Manifest) -> torch.Tensor | None:
    """Return the bytes of a segment, mapped; None if they are damaged."""
    try:
        content = map_segment(path)
    except (OSError, ValueError):
        return None
    if content.numel() < manifest.nbytes:
        return None
    content = content[: manifest.nbytes]
    return content if checksum(content) == manifest.checksum else None

"""Checksums of the files of a checkpoint, and their comparison before a load.

Owns the file of checksums, beside the files of ``torch.distributed.checkpoint``, which has none: a
byte that a disk changed is loaded without an error. The name of the file has the number of the
save, so that it belongs to one ``.metadata`` and is never a mixture of two saves.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

from fullshard.checkpoint.agreement import format_error
from fullshard.checkpoint.process_groups import own_group
from fullshard.checkpoint.saving.meeting import Meeting

__all__ = [
    "DamagedCheckpointError",
    "check_checkpoint",
    "checksum_of",
    "remove_checksums",
    "write_checksums",
]

_T = TypeVar("_T")

_AT_ONCE = 2**24  # bytes
_NAME = ".checksums-{}.json"
_METADATA = ".metadata"
_MISSING = "is missing on rank"


class DamagedCheckpointError(RuntimeError):
    """Files of a checkpoint are not as they were written. Raised on every rank.

    Attributes:
        files: their names in the folder.
    """

    def __init__(self, folder: Path, found: Mapping[str, str]) -> None:
        """Take what is wrong with each file."""
        wrong = "; ".join(f"{name} {what}" for name, what in sorted(found.items()))
        super().__init__(
            f"the checkpoint in {folder} is damaged: {wrong}. Load another checkpoint, or a copy "
            "of these files"
        )
        self.files = tuple(sorted(found))


def checksum_of(path: Path) -> int:
    """Return the CRC-32 of a file."""
    found = 0
    with path.open("rb") as file:
        while part := file.read(_AT_ONCE):
            found = zlib.crc32(part, found)
    return found


def checksums_name(save_id: str) -> str:
    """Return the name of the file of checksums of a save."""
    return _NAME.format(save_id)


def write_checksums(folder: Path, save_id: str, sums: Sequence[Mapping[str, int]]) -> Path:
    """Write the checksums of a save, of each rank's files and of ``.metadata``, to the disk.

    Args:
        folder: that of ``.metadata``, before it takes its place.
        save_id: the number of the save.
        sums: for each rank the checksums of its files.

    Returns:
        The file.
    """
    path = folder / checksums_name(save_id)
    with path.open("w") as file:
        json.dump({**_merged(sums), _METADATA: checksum_of(folder / _METADATA)}, file)
        file.flush()
        os.fsync(file.fileno())
    return path


def remove_checksums(folder: Path, kept: str = "") -> None:
    """Remove all files of checksums but that of the save ``kept``."""
    for path in folder.glob(_NAME.format("*")):
        if path.name != checksums_name(kept):
            path.unlink(missing_ok=True)


def check_checkpoint(
    folder: str | os.PathLike[str], *, group: dist.ProcessGroup | None = None
) -> bool:
    """Compare the files of a checkpoint with the checksums that ``async_save`` wrote.

    Each rank reads a share of the files. Call it before ``torch.distributed.checkpoint.load``, on
    every rank, and not while a save into ``folder`` is under way.

    Args:
        folder: that of the checkpoint.
        group: a gloo process group of the ranks; None: one that is made for this, of all ranks.

    Returns:
        Whether the checkpoint has checksums; those of torch and of older versions have none.

    Raises:
        DamagedCheckpointError: on every rank, if a file is missing, or not as it was written.
        FileNotFoundError: on every rank, if one finds no checkpoint in the folder.
    """
    path = Path(folder)
    if group is None and dist.is_available() and dist.is_initialized():
        group = own_group("checks of checkpoints")
    meeting = Meeting(group)
    sums, mine = dict[str, int](), dict[str, str]()
    if not (path / _METADATA).exists():
        mine[_METADATA] = f"{_MISSING} {meeting.rank}"
    else:
        try:
            sums = _checksums(path)
        except (OSError, ValueError, LookupError, TypeError) as error:
            mine["a file of checksums"] = f"cannot be read ({format_error(error)})"
    for name in sorted(sums)[meeting.rank :: meeting.size]:
        if wrong := _compared(path / name, sums[name]):
            mine[name] = wrong
    found = meeting.ask(mine, _merged)
    if found.get(_METADATA, "").startswith(_MISSING):
        raise FileNotFoundError(
            f"{path} is no checkpoint: {_METADATA} {found[_METADATA]}; pass the folder of a "
            "checkpoint, on storage that all ranks share"
        )
    if found:
        raise DamagedCheckpointError(path, found)
    return bool(sums)


def _checksums(folder: Path) -> dict[str, int]:
    """Return the checksums of the checkpoint in ``folder``; empty if it has none.

    A save of torch into the folder leaves the checksums of an older save, of other files.
    """
    every: list[dict[str, int]] = [
        json.loads(path.read_text()) for path in folder.glob(_NAME.format("*"))
    ]
    own = checksum_of(folder / _METADATA)
    for sums in every:
        if sums[_METADATA] == own:
            return sums
    try:
        stored = FileSystemReader(folder).read_metadata().storage_data or {}
        files = {info.relative_path for info in stored.values()}
    except Exception:  # a damaged pickle may raise any; the checksums are compared next
        files = set()
    for sums in every:
        if not files or files & sums.keys():
            return sums
    return {}


def _compared(path: Path, wanted: int) -> str:
    """Return what is wrong with a file; empty if nothing is."""
    try:
        return "" if checksum_of(path) == wanted else "is not as it was written"
    except OSError as error:
        return f"cannot be read ({format_error(error)})"


def _merged(everyone: Sequence[Mapping[str, _T]]) -> dict[str, _T]:
    return {name: value for each in everyone for name, value in each.items()}

"""Writes a copy of a state dict into a folder, as ``torch.distributed.checkpoint`` reads it.

Owns who writes what, and the instant in which the new checkpoint takes the old one's place. Items,
files and metadata are those of torch's planner and writer.

[Note: plans without communication] torch's save sends every rank's plan to one rank and back before
a byte is written. Here each rank knows what it writes: a shard is written by one of its replicas,
chosen by its name; what is no ``DTensor`` by a rank chosen by its name, too. Ranks only compare
one digest of those names, and bring their plans together when all is written, for the metadata.

[Note: a rank is lost] The first rank replaces ``.metadata`` only after it has heard of all ranks
that their files are written. If a rank is lost before that, the old checkpoint stays, and the other
ranks remove their files. A rank that loses the first one at the end cannot know whether it replaced
``.metadata`` before: it looks, and leaves its files.

[Note: old or new] A save writes files that no other save names, brings them to the disk, and then
replaces ``.metadata``, which names the files of a checkpoint, in one rename. Only then the old
files go. torch's own save overwrites the old files, and deletes the old ``.metadata`` before it
renames the new one: killed in between, it leaves no checkpoint.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import uuid
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.agreement import format_error
from fullshard.checkpoint.files.write_errors import write_error
from fullshard.checkpoint.saving.file_checksums import (
    checksums_name,
    remove_checksums,
    write_checksums,
)
from fullshard.checkpoint.saving.meeting import LostRanksError, Meeting
from fullshard.checkpoint.saving.zip_checksums import checksum_of_zips

__all__ = ["SaveError", "write"]

_FILES = "__*.distcp"


class SaveError(RuntimeError):
    """A checkpoint was not written; what was in its folder is untouched. Raised on every rank.

    A rank that loses the first rank at the end of a save raises it, too, also if the new checkpoint
    is there: the text names the checkpoint that is there.

    Attributes:
        reason: what went wrong, on which rank.
        lost: the global numbers of ranks that cannot be reached any more.
    """

    def __init__(
        self, folder: Path, reason: str, *, lost: Sequence[int] = (), written: bool = False
    ) -> None:
        """Take what went wrong.

        Args:
            folder: that of the checkpoint.
            reason: what went wrong, on which rank.
            lost: ranks that cannot be reached any more.
            written: the new checkpoint is there all the same.
        """
        fate = "was written" if written else "was not written, what was there is untouched"
        cure = f". Restart the job, and load {folder}" if lost else ""
        super().__init__(f"the checkpoint in {folder} {fate}: {reason}{cure}")
        self.reason = reason
        self.lost = tuple(lost)


@dataclasses.dataclass(frozen=True)
class _Written:
    """A rank's report to the first one.

    Attributes:
        plan: its part of the plan.
        results: the file of each part.
        sums: checksums of its files.
        plain: checksums of its values that are no ``DTensor``, written by it or not.
        error: what went wrong.
    """

    plan: SavePlan
    results: Sequence[WriteResult]
    sums: Mapping[str, int]
    plain: Mapping[str, int]
    error: str


def write(
    state: Mapping[str, Any],
    folder: Path,
    group: dist.ProcessGroup | None,
    error: BaseException | None,
) -> list[str]:
    """Write ``state`` into ``folder``; return on every rank when the new checkpoint is there.

    Args:
        state: of this rank, on the CPU.
        folder: the checkpoint's folder, with one path on all ranks.
        group: the ranks, all of which call this; None: there is one.
        error: what this rank found wrong before.

    Returns:
        On the first rank, the names of the entries of which ranks have different values, and the
        checkpoint that of one rank.

    Raises:
        SaveError: on every rank, if any of them failed, or was lost.
    """
    meeting, planner = Meeting(group), DefaultSavePlanner()
    mine, results, sums = SavePlan([]), list[WriteResult](), dict[str, int]()
    plain, differing = dict[str, int](), list[str]()
    try:
        planner.set_up_planner(dict(state), is_coordinator=meeting.rank == 0)
        whole = {k for k, value in planner.state_dict.items() if not isinstance(value, DTensor)}
    except Exception as caught:
        whole, error = set(), error or caught
    try:
        save_id, owners = _agreed(sorted(whole), meeting)
    except LostRanksError as lost:
        raise SaveError(folder, str(lost), lost=lost.ranks) from lost
    prefix = f"__{meeting.rank}_{save_id}_"
    try:
        if error is None:
            mine = _own_part(planner, owners, meeting.rank)
            results = _write_files(planner, mine, folder, prefix)
            sums = {
                name: checksum_of_zips(folder / name, parts)
                for name, parts in _files(results).items()
            }
            plain = _plain_sums(planner.state_dict)
    except Exception as caught:
        error = write_error(caught, folder / f"{prefix}0.distcp", sum(map(_nbytes, mine.items)))

    def commit(told: Sequence[_Written]) -> str:
        differing.extend(_differing([each.plain for each in told]))
        return _commit(planner, told, folder, save_id)

    try:
        verdict = meeting.ask(_Written(mine, results, sums, plain, format_error(error)), commit)
    except LostRanksError as lost:
        written = lost.first and _is_there(folder, save_id)
        if not lost.first:
            _remove_files_of(folder, prefix, sums)
        raise SaveError(folder, str(lost), lost=lost.ranks, written=written) from lost
    if verdict:
        _remove_files_of(folder, prefix, sums)
        raise SaveError(folder, verdict) from error
    return differing


def _plain_sums(state: Mapping[str, Any]) -> dict[str, int]:
    """Return a checksum of each value that can be compared between ranks.

    The result holds tensors of torch's own class, with dtype and shape, and numbers and texts.
    """
    sums = dict[str, int]()
    for name, value in state.items():
        if isinstance(value, (int, float, complex, str, bytes)):
            sums[name] = zlib.crc32(repr(value).encode())
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            continue
        kind = zlib.crc32(f"{value.dtype} {tuple(value.shape)}".encode())
        with suppress(RuntimeError, TypeError):  # of a dtype without a view of its bytes
            data = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
            sums[name] = zlib.crc32(memoryview(data.view(torch.uint8).numpy()), kind)
    return sums


def _differing(everyone: Sequence[Mapping[str, int]]) -> list[str]:
    """Return the names whose checksums are not equal on the ranks that have the name."""
    first, differing = dict[str, int](), set[str]()
    for sums in everyone:
        for name, found in sums.items():
            if first.setdefault(name, found) != found:
                differing.add(name)
    return sorted(differing)


def _agreed(names: Sequence[str], meeting: Meeting) -> tuple[str, dict[str, int]]:
    """Return what the save is called in its files, and who writes each whole entry.

    Args:
        names: names of the entries that are not a ``DTensor``.
        meeting: the ranks.
    """
    digest, save_id = hashlib.sha256("\n".join(names).encode()).digest(), uuid.uuid4().hex[:12]
    save_id, alike = meeting.ask(digest, lambda digests: (save_id, len(set(digests)) == 1))
    if alike:
        return save_id, {name: zlib.crc32(name.encode()) % meeting.size for name in names}
    return save_id, meeting.ask(names, _first_owners)


def _first_owners(everyone: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return the first rank that has each name."""
    owners: dict[str, int] = {}
    for rank, theirs in enumerate(everyone):
        for name in theirs:
            owners.setdefault(name, rank)
    return owners


def _is_there(folder: Path, save_id: str) -> bool:
    """Tell whether the checkpoint in ``folder`` is that of this save."""
    try:
        stored = FileSystemReader(folder).read_metadata().storage_data or {}
    except Exception:  # there is none
        return False
    return any(f"_{save_id}_" in info.relative_path for info in stored.values())


def _own_part(planner: DefaultSavePlanner, owners: Mapping[str, int], rank: int) -> SavePlan:
    """Return what this rank writes; see [Note: plans without communication]."""
    plan = planner.create_local_plan()
    items = []
    for item in plan.items:
        name = item.index.fqn
        value = planner.state_dict[name]
        if _writes(name, value) if isinstance(value, DTensor) else owners[name] == rank:
            items.append(item)
    return dataclasses.replace(plan, items=items)


def _writes(name: str, tensor: DTensor) -> bool:
    """Return whether this rank writes the shard, among the replicas that have it."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "else there is no item"
    if tensor.to_local().numel() == 0 and tensor.numel() > 0:
        return False
    replica = replicas = 1
    replica = 0
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate() or tensor.numel() == 0:
            size = tensor.device_mesh.size(axis)
            replica, replicas = replica * size + coordinate[axis], replicas * size
    return zlib.crc32(name.encode()) % replicas == replica


def _write_files(
    planner: DefaultSavePlanner, plan: SavePlan, folder: Path, prefix: str
) -> list[WriteResult]:
    folder.mkdir(parents=True, exist_ok=True)
    if not plan.items:
        return []
    writer = FileSystemWriter(folder)
    (plan,) = writer.prepare_global_plan([plan])
    named = dataclasses.replace(plan.storage_data, prefix=prefix)
    results: list[WriteResult] = writer.write_data(
        dataclasses.replace(plan, storage_data=named), planner
    ).wait()
    return results


def _nbytes(item: WriteItem) -> int:
    """Return the bytes of the elements that ``item`` writes."""
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _files(results: Sequence[WriteResult]) -> dict[str, list[tuple[int, int]]]:
    """Return the first byte and the length of each part of the files that were written, by name."""
    found: dict[str, list[tuple[int, int]]] = {}
    for stored in (result.storage_data for result in results):
        found.setdefault(stored.relative_path, []).append((stored.offset, stored.length))
    return found


def _commit(
    planner: DefaultSavePlanner, told: Sequence[_Written], folder: Path, save_id: str
) -> str:
    """Make what was written the checkpoint, on the first rank; return what went wrong."""
    errors = [f"rank {rank}: {each.error}" for rank, each in enumerate(told) if each.error]
    if errors:
        return "; ".join(errors)
    temporary = folder / f".committing-{uuid.uuid4().hex[:12]}"
    try:
        _require_all(told, folder)
        _, metadata = planner.create_global_plan([each.plan for each in told])
        temporary.mkdir()
        FileSystemWriter(temporary).finish(metadata, [[*each.results] for each in told])
        sums = write_checksums(temporary, save_id, [each.sums for each in told])
        sums.replace(folder / sums.name)
        _to_disk(folder)
        (temporary / ".metadata").replace(folder / ".metadata")
    except Exception as error:
        with suppress(OSError):
            (folder / checksums_name(save_id)).unlink(missing_ok=True)
        return f"rank 0: {format_error(write_error(error, folder))}"
    finally:
        _remove_folder(temporary, (".metadata", ".metadata.tmp", checksums_name(save_id)))
    kept = {name for each in told for name in each.sums}
    with suppress(OSError):  # the next save removes them
        _to_disk(folder)  # else the system may yet lose the rename
        remove_checksums(folder, kept=save_id)
        for path in folder.glob(_FILES):
            if path.name not in kept:
                path.unlink(missing_ok=True)
        for leftover in folder.glob(".committing-*"):
            shutil.rmtree(leftover, ignore_errors=True)
    return ""


def _remove_folder(folder: Path, names: Sequence[str]) -> None:
    """Remove a folder of files of these names.

    The names are given because the process may have no file descriptor left to list the folder.
    """
    with suppress(OSError):  # it was not made, or the file system became read-only
        for name in names:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def _require_all(told: Sequence[_Written], folder: Path) -> None:
    """Return if this rank sees the files of all ranks.

    Raises:
        FileNotFoundError: if ranks have other folders, or no storage in common.
    """
    for rank, each in enumerate(told):
        for name in each.sums:
            path = folder / name
            if not path.exists():
                raise FileNotFoundError(
                    f"{path}, which rank {rank} wrote, is not in the folder of rank 0; pass the "
                    "same folder on every rank, on storage that all of them share"
                )


def _to_disk(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_files_of(folder: Path, prefix: str, names: Iterable[str]) -> None:
    """Remove this rank's files of a save that failed.

    Args:
        folder: the checkpoint's.
        prefix: of the names of the files.
        names: of the files that are known to be complete. They are removed also if the process has
            no file descriptor left to list the folder; the next save removes the others then.
    """
    found = set(names)
    with suppress(OSError):  # Python 3.12 lists nothing instead
        found.update(path.name for path in folder.glob(f"{prefix}*"))
    with suppress(OSError):  # the file system became read-only
        for name in found:
            (folder / name).unlink(missing_ok=True)

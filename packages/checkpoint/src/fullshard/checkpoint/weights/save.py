"""Saves a model's weights as safetensors files, each written by one rank out of all ranks' shards.

Owns the order: plan, agree, write, agree, put the new set in the old one's place.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from fullshard.checkpoint.agreement import agree_over
from fullshard.checkpoint.boxes import Box
from fullshard.checkpoint.files.checksums import PartialSum, Sums, joined
from fullshard.checkpoint.files.folder import SaveFolder
from fullshard.checkpoint.files.open_files import OpenFiles
from fullshard.checkpoint.files.runs import span_of
from fullshard.checkpoint.files.write_errors import write_error
from fullshard.checkpoint.transfer import Sender, sender_of
from fullshard.checkpoint.weights.layout import (
    PlannedFile,
    bytes_of,
    planned_files,
    planned_tensors,
)
from fullshard.checkpoint.weights.matching import Rename, naming_of
from fullshard.checkpoint.weights.ranks import SAVING, agree_on_writes, attempt
from fullshard.checkpoint.weights.report import SaveReport
from fullshard.checkpoint.weights.sending import FileBlock, Rounds, blocks_of, shares_of
from fullshard.checkpoint.weights.tensors import (
    ModelTensor,
    groups_of,
    require_no_block,
    tensors_of,
)
from fullshard.comm import file_access, waiting
from fullshard.sharding.spi import require_bool, require_count

__all__ = ["SaveOptions", "save_safetensors"]

T = TypeVar("T")

_SMALLEST = 1024  # bytes of a buffer
_ID = 8  # hexadecimal digits


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """How weights are written.

    Attributes:
        buffer_bytes: all host memory that a rank allocates, except for the shards.
        writers_per_file: ranks that write into one file, each its own range. More than one is
            faster where one file is on many disks; shared pages slow down network file systems.
        process_group: the ranks that save; None: all, or those of the model's one mesh axis.
        metadata: text for the header of each file.
        stem: what the set is called: ``model.safetensors``; peft wants ``adapter_model``.
        checksums: put checksums of the tensors into the metadata of the files, for
            ``load_safetensors`` to compare. Other readers leave them alone.

    Raises:
        TypeError: if a number is no int, or metadata or the stem no text.
        ValueError: if ``buffer_bytes`` is below 1024, or ``writers_per_file`` below 1.
    """

    buffer_bytes: int = 64 * 2**20
    writers_per_file: int = 1
    process_group: dist.ProcessGroup | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    stem: str = "model"
    checksums: bool = True

    def __post_init__(self) -> None:
        """Check each."""
        require_count("buffer_bytes", self.buffer_bytes)
        require_count("writers_per_file", self.writers_per_file)
        require_bool("checksums", self.checksums)
        if self.buffer_bytes < _SMALLEST:
            raise ValueError(f"buffer_bytes is {self.buffer_bytes}; pass {_SMALLEST} or more")
        texts = [self.stem, *itertools.chain(*self.metadata.items())]
        if not all(isinstance(each, str) for each in texts) or Path(self.stem).name != self.stem:
            raise TypeError(
                f"metadata is {self.metadata!r} and stem {self.stem!r}; pass text for both, and a "
                "stem that is a file's name"
            )

    def said(self) -> str:
        """Return a text that must be equal on all ranks: it decides who writes what, and where."""
        return (
            f"buffer_bytes={self.buffer_bytes}, writers_per_file={self.writers_per_file}, "
            f"metadata={sorted(self.metadata.items())}, stem={self.stem!r}, "
            f"checksums={self.checksums}"
        )


_DEFAULTS = SaveOptions()


@torch.no_grad()
def save_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    rename: Rename = None,
    options: SaveOptions = _DEFAULTS,
) -> SaveReport:
    """Save the weights of ``model`` as plain libraries read them; return what was written.

    Call it on every rank of the model, between steps. The set is one file if all tensors fit in
    ``max_shard_size``, and otherwise several files and an index. The old set in ``folder`` is
    there, whole, until the new one is; then its files are removed. A tied parameter is written
    once, under its first name; the header names the tied parameters, as in the safetensors library.

    A model without a ``DTensor`` is saved by the first rank alone, without a collective, unless
    ``options`` name a process group.

    Args:
        model: sharded in any way (``DTensor``), or not.
        folder: made if it is not there; its other files are left alone. Every host must have access
            to it.
        max_shard_size: bytes of a file, or text such as ``"5GB"``. A larger tensor has its own.
        dtype: that of floating tensors in the files; None: their own.
        rename: as for ``load_safetensors``: what loads a set, saves it back. None: a model of
            transformers is saved as its ``save_pretrained`` saves it.
        options: how files are written.

    Raises:
        OSError: on every rank, if there is no room, or a file cannot be written. The old set stays,
            unless the text reports the new one.
        RankMismatchError: if arguments differ, or on a rank that found no error in the model or the
            arguments, if another did.
        RuntimeError: if the model is in the middle of a step, or in an ``unsharded`` block.
        TypeError: if an argument is of the wrong type.
        ValueError: if ``max_shard_size`` is no size, or the ranks of the model are not known.
        WeightsError: if rules do not fit, or a tensor cannot be written.
    """
    require_no_block(tensors_of(model), "save_safetensors()")
    groups_of(tensors_of(model), "save_safetensors()")
    tensors = tensors_of(model)
    sender = _sender(tensors, getattr(options, "process_group", None))
    alone = sender is None and dist.is_available() and dist.is_initialized()
    if alone and dist.get_rank() != 0:
        return SaveReport(files=(), index=None, total_bytes=0, bytes_written=0, bytes_sent=0)
    path, told, error = Path(), list[str](), None
    files = list[PlannedFile]()
    try:
        path, size = Path(folder), bytes_of(max_shard_size)
        files = _planned(model, tensors, size, dtype, rename, options)
        written = [tensor for file in files for tensor in file.tensors]
        told = [f"{each.name}: {each.dtype} {each.shape}" for each in written]
        told.append(f"max_shard_size={size}, {options.said()}")
    except Exception as caught:
        error = caught
    _agree(sender, told, error)
    with file_access("weights"):
        return _Saving(tensors, path, files, sender, options).run()


def _sender(tensors: Sequence[ModelTensor], group: dist.ProcessGroup | None) -> Sender | None:
    if group is None and not any(each.sharded for each in tensors):
        return None
    params = {each.name: each.tensor for each in tensors}
    found = sender_of(params, group)
    return None if found is None or found.process_group.size() == 1 else found


def _agree(sender: Sender | None, lines: Sequence[str], error: Exception | None) -> None:
    group = None if sender is None else sender.process_group
    device = torch.device("cpu") if sender is None else sender.device
    agree_over(SAVING, group, device, lines, error)


def _planned(
    model: nn.Module,
    tensors: Sequence[ModelTensor],
    max_bytes: int,
    dtype: torch.dtype | None,
    rename: Rename,
    options: SaveOptions,
) -> list[PlannedFile]:
    if not isinstance(options, SaveOptions):
        raise TypeError(f"options is a {type(options).__name__}; pass SaveOptions(...)")
    if not isinstance(dtype, torch.dtype | None):
        raise TypeError(f"dtype is {dtype!r}; pass a torch.dtype, or None")
    names = naming_of(model, rename)
    for each in tensors:
        each.check()
        if each.local.is_meta:
            raise ValueError(f"{each.name} is on the meta device; give it values before saving")
    found, ties = planned_tensors(tensors, names, dtype)
    metadata = {"format": "pt", **ties, **options.metadata}
    return planned_files(found, max_bytes, metadata, checksums=options.checksums)


class _Saving:
    """The plan of a save, which all ranks share, and its execution."""

    def __init__(
        self,
        tensors: Sequence[ModelTensor],
        folder: Path,
        files: Sequence[PlannedFile],
        sender: Sender | None,
        options: SaveOptions,
    ) -> None:
        self._tensors = tensors
        self._files = files
        self._sender = sender
        self._options = options
        self._rank = 0 if sender is None else sender.process_group.rank()
        self._size = 1 if sender is None else sender.process_group.size()
        self._boxes, save_id = self._told()
        self._folder = SaveFolder(folder, options.stem, save_id, len(files))
        self._open = OpenFiles(self._folder, [file.nbytes for file in files])
        self._sums = Sums()

    def _told(self) -> tuple[list[list[Box]], str]:
        """Return what each rank has of each tensor, and the first rank's number of the save."""
        told = ([each.box for each in self._tensors], uuid.uuid4().hex[:_ID])
        everyone = [told] * self._size
        if self._sender is not None:
            with waiting("agreement"):
                dist.all_gather_object(everyone, told, group=self._sender.process_group)
        return [boxes for boxes, _ in everyone], everyone[0][1]

    def run(self) -> SaveReport:
        """Write all files, and make them the set."""
        total = sum(tensor.nbytes for file in self._files for tensor in file.tensors)
        batches = self._together(self._batches)
        rounds = Rounds(self._tensors, self._sender, batches)
        with ExitStack() as undo:
            undo.callback(self._abandon)
            self._together(lambda: self._prepare(total))
            self._together(self._create)
            error = rounds.run(self._write)
            self._settle(error)
            sums = self._told_sums() if self._options.checksums else []
            self._together(lambda: self._close(sums))
            old = self._together(lambda: self._commit(total))
            undo.pop_all()
        self._together(lambda: self._remove(old))
        return SaveReport(
            files=tuple(self._folder.final(number) for number in range(len(self._files))),
            index=self._folder.index if len(self._files) > 1 else None,
            total_bytes=total,
            bytes_written=self._open.written,
            bytes_sent=rounds.sent,
        )

    def _settle(self, error: Exception | None) -> None:
        told = None if error is None else write_error(error, self._folder.path)
        agree_on_writes(self._sender, told)

    def _together(self, call: Callable[[], T]) -> T:
        """Return what ``call`` returns; raise on every rank what it raises on one."""
        found, error = attempt(call)
        self._settle(error)
        return cast(T, found)

    def _prepare(self, total: int) -> None:
        if self._rank == 0:
            sizes = [file.nbytes for file in self._files]
            if len(self._files) > 1:
                sizes.append(len(self._folder.index_text(self._names(), total)))
            self._folder.prepare(sizes)

    def _names(self) -> dict[str, str]:
        """Return the file name of each tensor."""
        return {
            tensor.name: self._folder.final(number).name
            for number, file in enumerate(self._files)
            for tensor in file.tensors
        }

    # -- who writes what --------------------------------------------------------------------------

    def _writer(self, file: int, part: int = 0) -> int:
        """Return the rank that writes a part of a file; they are spread over all ranks."""
        each = self._options.writers_per_file
        job, jobs = file * each + part, len(self._files) * each
        return job % self._size if jobs > self._size else job * self._size // jobs

    def _batches(self) -> list[list[list[FileBlock]]]:
        """Return what each rank writes in each round."""
        jobs = len(self._files) * self._options.writers_per_file
        # the received parts, a block of the file, and the parts for every writer
        limit = self._options.buffer_bytes // (min(jobs, self._size) + 2) // 16 * 16
        sharded = [each.sharded for each in self._tensors]
        found: list[list[list[FileBlock]]] = [[] for _ in range(self._size)]
        for number, file in enumerate(self._files):
            at = first = len(file.header)
            part = max(1, -(-(file.nbytes - first) // self._options.writers_per_file))
            for tensor in file.tensors:
                shares = shares_of(tensor, self._boxes, sharded, self._writer(number))
                for block in blocks_of(number, shares, at, max(min(limit, part), 16)):
                    rank = self._writer(number, (block.offset - first) // part)
                    _add(found[rank], block, limit)
                at += tensor.nbytes
        return found

    # -- files ------------------------------------------------------------------------------------

    def _create(self) -> None:
        """Begin the files of which this rank writes the first bytes."""
        for number, file in enumerate(self._files):
            if self._writer(number) == self._rank:
                self._open.create(number)
                if not self._options.checksums:  # else they are known in the end
                    self._open.put(number, memoryview(file.header), 0)

    def _write(self, block: FileBlock, content: memoryview) -> None:
        if self._options.checksums:
            tensor = block.shares.tensor
            first, _ = span_of(block.box, tensor.shape)
            self._sums.add(block.file, tensor.name, first * tensor.dtype.itemsize, content)
        self._open.put(block.file, content, block.offset)

    def _told_sums(self) -> list[dict[int, dict[str, list[PartialSum]]]]:
        """Return the checksums that each rank found, of files whose header this one writes."""
        mine = {number: self._sums.of(number) for number in range(len(self._files))}
        everyone = [mine]
        if self._sender is not None and self._options.writers_per_file > 1:
            everyone *= self._size
            with waiting("checksums"):
                dist.all_gather_object(everyone, mine, group=self._sender.process_group)
        return everyone

    def _close(self, sums: Sequence[Mapping[int, Mapping[str, Sequence[PartialSum]]]]) -> None:
        """Write the checksums into the headers, and bring all that was written to the disk."""
        for number, file in enumerate(self._files):
            if sums and self._writer(number) == self._rank:
                found = {
                    each.name: joined(
                        piece for told in sums for piece in told[number].get(each.name, ())
                    )
                    for each in file.tensors
                }
                header = file.header_with(found)
                assert len(header) == len(file.header), "room was left for all checksums"
                self._open.put(number, memoryview(header), 0)
        self._open.finish()

    def _abandon(self) -> None:
        numbers = range(len(self._files))
        self._open.abandon()
        self._folder.abandon([each for each in numbers if self._writer(each) == self._rank])

    def _commit(self, total: int) -> list[Path]:
        return self._folder.commit(self._names(), total) if self._rank == 0 else []

    def _remove(self, old: Sequence[Path]) -> None:
        if self._rank != 0:
            return
        try:
            self._folder.remove(old)
        except OSError as error:
            told = write_error(error, self._folder.path)
            text = f"the new set is in {self._folder.path}, complete; old files stay there: {told}"
            raise OSError(error.errno, text) from error


def _add(rounds: list[list[FileBlock]], block: FileBlock, limit: int) -> None:
    """Add ``block`` to the last of a rank's rounds, or to a new one."""
    if not rounds or sum(each.nbytes for each in rounds[-1]) + block.nbytes > limit:
        rounds.append([])
    rounds[-1].append(block)

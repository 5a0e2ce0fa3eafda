"""Folders of ``torch.distributed.checkpoint``, which FSDP1 calls sharded; read tensor by tensor.

The folder's metadata has the nested names. Written weights are nested under ``model``, as in
``async_save({"model": ...})``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fullshard.cli.converting.entry import (
    Checkpoint,
    ConvertError,
    Entry,
    chosen_group,
    one_of_each,
)

__all__ = ["METADATA", "open_dcp", "write_dcp"]

METADATA = ".metadata"
FILE = 2**30  # bytes of tensors in one file, which are in memory together
_USUAL = ("model", "state_dict", "model_state_dict", "module")


class _Known(dcp.FileSystemReader):
    """A reader that reads the metadata once, however many loads follow."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._known = super().read_metadata()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata."""
        return self._known


def open_dcp(path: Path, key: str | None) -> Checkpoint:
    """Return the tensors of the model in a folder.

    Raises:
        ConvertError: if the folder's metadata cannot be read.
    """
    try:
        reader = _Known(path)
    except Exception as error:
        raise ConvertError(f"{path} has no {METADATA} that torch can read: {error}") from error
    metadata = reader.read_metadata()
    nested: dict[str, Any] = metadata.planner_data or {}
    paths = {
        flat: tuple(map(str, nested.get(flat, (flat,)))) for flat in metadata.state_dict_metadata
    }
    stored = {
        flat: each
        for flat, each in metadata.state_dict_metadata.items()
        if isinstance(each, TensorStorageMetadata)
    }
    group = chosen_group((paths[flat][:-1] for flat in stored), key, _USUAL, path)
    weights = {flat: each for flat, each in stored.items() if paths[flat][:-1] == group}
    entries = [
        Entry(
            name=paths[flat][-1],
            shape=tuple(each.size),
            dtype=each.properties.dtype,
            read=partial(_read, reader, flat, each),
        )
        for flat, each in weights.items()
    ]
    return Checkpoint(
        path=path,
        format="dcp",
        entries=one_of_each(entries, path),
        left_out=tuple(flat for flat in paths if flat not in weights),
    )


def _read(reader: _Known, flat: str, stored: TensorStorageMetadata) -> torch.Tensor:
    tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
    try:
        with _in_one_process():
            dcp.load({flat: tensor}, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        causes = _causes(error)
        raise ConvertError(f"{flat} cannot be read from {reader.path}: {causes}") from error
    return tensor


def _causes(error: CheckpointException) -> str:
    """Return the messages of the exceptions that torch caught.

    Raises:
        KeyboardInterrupt: if torch caught one.
    """
    causes = [cause for cause, _ in error.failures.values()]
    if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
        raise KeyboardInterrupt
    return "; ".join(map(str, causes))


@contextmanager
def _in_one_process() -> Iterator[None]:
    """Silence torch's warning that there is no process group: none is needed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class _OneByOne(dcp.DefaultSavePlanner):
    """A planner over tensors without data, each of which is read when it is written."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        super().__init__()
        self._by_name = {f"model.{each.name}": each for each in entries}

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """Return the tensor, with its data."""
        return self._by_name[index.fqn].read()

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Return the object as it is."""
        return object


class _Bounded(dcp.FileSystemWriter):
    """A writer of several files, since torch's keeps the tensors of a file until its end."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write one file after another."""
        results: list[WriteResult] = []
        for number, items in enumerate(_by_size(plan.items)):
            named = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{number}_")
            part = replace(plan, items=items, storage_data=named)
            results += super().write_data(part, planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _by_size(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    """Yield groups of items of at most ``FILE`` bytes, or of one item."""
    group: list[WriteItem] = []
    room = FILE
    for item in items:
        size = item.tensor_storage_size() or 0
        if group and size > room:
            yield group
            group, room = [], FILE
        group.append(item)
        room -= size
    if group:
        yield group


def write_dcp(entries: Sequence[Entry], path: Path) -> list[str]:
    """Write a folder; return the names of the files.

    Raises:
        ConvertError: if a tensor cannot be read.
        OSError, RuntimeError: if it cannot be written; see ``write_error``.
    """
    shapes = {
        each.name: torch.empty(each.shape, dtype=each.dtype, device="meta") for each in entries
    }
    writer, planner = _Bounded(path, thread_count=1), _OneByOne(entries)
    try:
        with _in_one_process():
            dcp.save({"model": shapes}, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:
        ((cause, _),) = error.failures.values()  # of the one process
        raise cause from error
    return sorted(each.name for each in path.iterdir())

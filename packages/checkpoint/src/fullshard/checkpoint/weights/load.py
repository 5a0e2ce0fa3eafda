"""Loads a model's weights from safetensors files: each rank reads the byte ranges of its shards.

Owns the order: match, agree, give memory, read, agree. A mismatch is raised on every rank before
any value is written to the model.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fullshard.checkpoint.files.headers import Stored, WeightsError
from fullshard.checkpoint.files.reading import FRAGMENT, Reader, bytes_from_device
from fullshard.checkpoint.files.sets import WeightSet, read_set
from fullshard.checkpoint.rules.conversions import Conversions, advice_on
from fullshard.checkpoint.weights.exchange import (
    alone_from,
    replicated_axes,
    send_to_replicas,
    together,
)
from fullshard.checkpoint.weights.matching import Rename, Target, matched_with, naming_of
from fullshard.checkpoint.weights.ranks import agree_over_meshes, attempt
from fullshard.checkpoint.weights.report import LoadReport, MismatchError, listed
from fullshard.checkpoint.weights.tensors import (
    ModelTensor,
    groups_of,
    materialise,
    require_no_block,
    tensors_of,
    unset_buffers,
)
from fullshard.comm import file_access
from fullshard.sharding.spi import require_bool

__all__ = ["LoadOptions", "load_safetensors"]

_SMALLEST = 1024  # bytes of a buffer


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How weights are read.

    Attributes:
        buffer_bytes: all host memory that loading allocates, except for the shards and a chunk of
            256 KiB for checksums.
        read_together: if several ranks need columns of the same rows, each rank reads some whole
            rows, and sends columns to its peers. If False, each rank reads its own parts, with the
            gaps between them.
        replicas_read: every replica of a shard reads it. If False, one replica reads and sends it.
        device: where tensors on the meta device are given memory; None: where sharded ones live by
            their policies, and others on the CPU.
        checksums: compare what is read with the checksums that ``save_safetensors`` put into the
            files, where they have any.

    Raises:
        TypeError: if ``buffer_bytes`` is no int, or ``checksums`` no bool.
        ValueError: if it is below 1024.
    """

    buffer_bytes: int = 64 * 2**20
    read_together: bool = True
    replicas_read: bool = False
    device: torch.device | str | None = None
    checksums: bool = True

    def __post_init__(self) -> None:
        """Check both."""
        require_bool("checksums", self.checksums)
        if isinstance(self.buffer_bytes, bool) or not isinstance(self.buffer_bytes, int):
            raise TypeError(f"buffer_bytes is {self.buffer_bytes!r}; pass an int")
        if self.buffer_bytes < _SMALLEST:
            raise ValueError(f"buffer_bytes is {self.buffer_bytes}; pass {_SMALLEST} or more")

    def said(self) -> str:
        """Return a text that must be equal on all ranks: ranks send each other what these say."""
        return (
            f"buffer_bytes={self.buffer_bytes}, read_together={self.read_together}, "
            f"replicas_read={self.replicas_read}, checksums={self.checksums}"
        )


_DEFAULTS = LoadOptions()


@torch.no_grad()
def load_safetensors(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    rename: Rename = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    options: LoadOptions = _DEFAULTS,
) -> LoadReport:
    """Load weights into ``model``, of which each rank reads its shards alone; return a report.

    Call it on every rank of the model, between steps. Values are written in place, and cast to the
    dtypes of the parameters: optimizers that were built before stay right. Tensors on the meta
    device are given memory first, those alone that the files have. A tied parameter is found by any
    of its names, the first counts.

    Args:
        model: sharded in any way (``DTensor``), or not; on the meta device, or not.
        path: a safetensors file, an index, or a folder with ``model.safetensors`` or
            ``model.safetensors.index.json``.
        rename: a map from the model's names to the names in the files: a function, a dict, or a
            list of ``Rule``, which also transpose, fuse and split. None for a name leaves it alone.
            Without it, a model of transformers is loaded as its ``from_pretrained`` loads it, where
            transformers is 5 or later.
        dtype: the dtype that floating tensors on the meta device get; None: the one they have.
        strict: missing and unexpected names are an error. If False, they are only in the report.
        options: how files are read.

    Raises:
        MismatchError: if names, shapes or dtypes do not fit; nothing was written.
        OSError: if a file cannot be read; if it happens later than the checks, the model has some
            of the tensors.
        RankMismatchError: on a rank that found no error, if another did, or they see other files.
        RuntimeError: if the model is in the middle of a step, or in an ``unsharded`` block.
        TypeError: if an argument is of the wrong type.
        ValueError: if ``dtype`` is for a parameter that has memory in another.
        WeightsError: if the files are damaged, or not there; nothing was written. If a checksum
            differs, the model has some of the tensors.
    """
    tensors = tensors_of(model)
    require_no_block(tensors, "load_safetensors()")
    plan, error = attempt(lambda: _planned(model, Path(path), rename, dtype, strict, options))
    agree_over_meshes(tensors, {} if plan is None else plan.said(), error)
    assert plan is not None, "else it raised"
    reader, error = attempt(lambda: Reader(options.buffer_bytes // 64 * 64))
    if error is None:
        _, error = attempt(lambda: _give_memory(plan.targets, dtype, options.device))
    agree_over_meshes(tensors, {}, error)
    assert reader is not None, "else it raised"
    try:
        with file_access("weights"):
            agree_over_meshes(tensors, {}, _read(plan, reader, options))
    finally:
        for group in groups_of(tensors_of(model), "load_safetensors()"):
            group.generation.advance()
    plan.report.on_meta = unset_buffers(model)
    if plan.report.on_meta:
        warnings.warn(
            f"buffers {listed(plan.report.on_meta)} are on the meta device, and the files do not "
            "have them: give them memory and values, as their modules compute them, before forward",
            stacklevel=3,
        )
    return plan.report


@dataclass(frozen=True)
class _Plan:
    """The plan of a load.

    Attributes:
        targets: what each tensor of the model is made of.
        stored: the tensors of the files.
        report: of what was found.
        options: how files are read.
    """

    targets: Sequence[Target]
    stored: Mapping[str, Stored]
    report: LoadReport
    options: LoadOptions

    def said(self) -> dict[str, str]:
        """Return texts that must be equal on all ranks: what is read for each tensor, and how."""
        found = {}
        for target in self.targets:
            names = dict.fromkeys(piece.file for piece in target.pieces)
            read = [
                f"{n} {self.stored[n].dtype_name} {self.stored[n].shape}, alone from "
                f"{alone_from(self.stored[n])} bytes on"
                for n in names
            ]
            found[target.tensor.name] = (
                f"{target.tensor.name} from {' and '.join(read)}, {self.options.said()}"
            )
        return found


def _planned(
    model: nn.Module,
    path: Path,
    rename: Rename,
    dtype: torch.dtype | None,
    strict: bool,
    options: LoadOptions,
) -> _Plan:
    if not isinstance(options, LoadOptions):
        raise TypeError(f"options is a {type(options).__name__}; pass LoadOptions(...)")
    if not isinstance(dtype, torch.dtype | None):
        raise TypeError(f"dtype is {dtype!r}; pass a torch.dtype, or None")
    names = naming_of(model, rename)
    groups_of(tensors_of(model), "load_safetensors()")
    tensors = tensors_of(model)
    for each in tensors:
        each.check()
        _check_dtype(each, dtype)
    found: WeightSet = read_set(path, checksums=options.checksums)
    targets, report = matched_with(tensors, names, found.tensors, dtype)
    problems = report.problems(strict=strict)
    if problems:
        advice = "pass rename= rules, or strict=False to load what fits"
        if rename is None and not isinstance(names, Conversions):
            advice += advice_on(path)
        raise MismatchError(
            f"{path} does not fit the model: {'; '.join(problems)}. {advice}", report
        )
    report.header_bytes = found.header_bytes
    return _Plan(targets, found.tensors, report, options)


def _check_dtype(each: ModelTensor, dtype: torch.dtype | None) -> None:
    if dtype is None or each.local.is_meta or not each.tensor.is_floating_point():
        return
    if each.tensor.dtype != dtype:
        raise ValueError(
            f"dtype is {dtype}, but {each.name} has memory in {each.tensor.dtype}; dtype is for "
            "tensors on the meta device: call model.to(dtype) first, or leave it out, and values "
            "are cast"
        )


def _give_memory(
    targets: Sequence[Target], dtype: torch.dtype | None, device: torch.device | str | None
) -> None:
    place = None if device is None else torch.device(device)
    materialise([target.tensor for target in targets], dtype, place)


def _read(plan: _Plan, reader: Reader, options: LoadOptions) -> Exception | None:
    """Read all tensors, with all collectives, and return the last error of this rank."""
    before, error = bytes_from_device(), None
    with closing(reader):
        for target in plan.targets:
            error = _read_one(reader, target, plan, options) or error
    after = bytes_from_device()
    plan.report.bytes_requested = reader.requested
    plan.report.bytes_beyond = reader.beyond
    plan.report.bytes_needed = sum(_needed(target, plan.stored) for target in plan.targets)
    if before is not None and after is not None:
        plan.report.bytes_from_device = after - before
    return error


def _needed(target: Target, stored: Mapping[str, Stored]) -> int:
    parts = [piece.of_shard(target.tensor.box) for piece in target.pieces]
    sizes = [
        part.in_file.numel * found.itemsize
        for part in parts
        if part is not None and (found := stored[part.file].dtype) is not None
    ]
    return sum(sizes) if math.prod(target.tensor.box.size) > 0 else 0


def _read_one(
    reader: Reader, target: Target, plan: _Plan, options: LoadOptions
) -> Exception | None:
    tensor, error = target.tensor, None
    box, local = tensor.box, tensor.local
    axes = [] if options.replicas_read else replicated_axes(tensor.tensor)
    if axes and tensor.shard_bytes < FRAGMENT:
        axes = []  # a broadcast takes longer than to read it again
    if not axes or not any(tensor.coordinates[axis] for axis in axes):
        for piece in target.pieces:
            stored = plan.stored[piece.file]
            assert stored.dtype is not None, "it was matched"
            all_of = together(tensor, piece, stored, reader.memory.numel())
            if all_of is not None and options.read_together:
                error = all_of.read(reader, stored, tensor) or error
                continue
            own = piece.of_shard(box) if box.numel > 0 else None
            if own is not None:
                view = own.view(local, box)
                try:
                    reader.read(stored, own.in_file, view)
                except (OSError, WeightsError) as caught:
                    error = caught
    if axes:
        send_to_replicas(tensor, axes, reader.memory.numel())
    return error

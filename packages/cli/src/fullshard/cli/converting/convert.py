"""Open a checkpoint of any format, write it in another, and read back what was written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from fullshard.checkpoint.spi import write_error
from fullshard.cli.converting.dcp_folders import METADATA, open_dcp, write_dcp
from fullshard.cli.converting.entry import Checkpoint, ConvertError, Entry
from fullshard.cli.converting.safetensors_files import (
    is_safetensors,
    open_safetensors,
    write_safetensors,
)
from fullshard.cli.converting.torch_files import SUFFIXES, open_torch_file, write_torch_file
from fullshard.cli.converting.zero_folders import is_zero, open_zero

__all__ = ["FORMATS", "Conversion", "convert", "open_checkpoint"]

FORMATS = ("dcp", "safetensors", "torch")
"""What can be written; DeepSpeed's format is only read."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A finished conversion.

    Attributes:
        source: what was read.
        target: the format that was written.
        files: names of the files.
        checked: whether all tensors were read back and were equal.
    """

    source: Checkpoint
    target: str
    files: tuple[str, ...]
    checked: bool


def open_checkpoint(path: Path, key: str | None = None) -> Checkpoint:
    """Return the tensors of the model in a checkpoint; the function recognises the format.

    Args:
        path: a folder of torch.distributed.checkpoint, safetensors files, a folder of DeepSpeed's
            ZeRO, or a file of ``torch.save``.
        key: which part of a nested state dict is the model; None: ``model``, or the only part.

    Raises:
        ConvertError: if the path does not exist, cannot be read, or has no known format.
    """
    try:
        return _opened(path, key)
    except (OSError, UnicodeDecodeError) as error:
        raise ConvertError(f"{path} cannot be read: {error}") from error


def _opened(path: Path, key: str | None) -> Checkpoint:
    if not path.exists():
        raise ConvertError(f"{path} does not exist; pass the folder or file of a checkpoint")
    if path.is_dir():
        if (path / METADATA).is_file():
            return open_dcp(path, key)
        if is_zero(path):
            return open_zero(path)
        below = [each.parent for each in path.glob(f"pytorch_model_fsdp*/{METADATA}")]
        if len(below) == 1:  # Accelerate's folder of weights, optimizer state and random state
            return open_dcp(below[0], key)
    elif path.suffix in SUFFIXES:
        return open_torch_file(path, key)
    if is_safetensors(path):
        return open_safetensors(path)
    raise ConvertError(
        f"{path} is no known checkpoint; pass a folder with {METADATA} (dcp), safetensors files, "
        f"a folder of DeepSpeed's ZeRO, or a file with a suffix {', '.join(SUFFIXES)}"
    )


def _format_of(target: Path, wanted: str | None, source: Checkpoint) -> str:
    by_suffix = {".safetensors": "safetensors"} | dict.fromkeys(SUFFIXES, "torch")
    named = by_suffix.get(target.suffix)
    if wanted == "torch" and named != "torch":
        raise ConvertError(f"--to torch {target}: use a file with a suffix {', '.join(SUFFIXES)}")
    if None not in (wanted, named) and wanted != named:
        raise ConvertError(
            f"--to {wanted} {target}: the suffix means {named}; use another name, or --to {named}"
        )
    return wanted or named or ("dcp" if source.format == "safetensors" else "safetensors")


def convert(
    source: Checkpoint,
    target: Path,
    *,
    to: str | None = None,
    dtype: torch.dtype | None = None,
    limit: int = 5 * 10**9,
    check: bool = True,
    progress: Callable[[str], None] = lambda name: None,
) -> Conversion:
    """Write the tensors of ``source``, one after another, to ``target``, which must not exist.

    The function writes into a temporary folder next to the target, compares, and moves the result
    to ``target``. After an error there is no target.

    Args:
        source: what to write.
        target: a new folder or file.
        to: one of ``FORMATS``; None: by the suffix, else a folder of safetensors files, or of
            torch.distributed.checkpoint if the source has safetensors files.
        dtype: of floating-point tensors; None: as stored.
        limit: bytes of one safetensors file.
        check: read all tensors back, and compare.
        progress: called with each name before its tensor is read for writing.

    Raises:
        ConvertError: if the target exists or cannot be written, or a written tensor differs.
    """
    kind = _format_of(target, to, source)
    entries = [each.cast(dtype) for each in source.entries]

    def announced(name: str, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        progress(name)
        return read()

    shown = [replace(each, read=partial(announced, each.name, each.read)) for each in entries]
    try:
        if target.exists():
            raise ConvertError(f"{target} exists; pass a folder or file that does not exist")
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
            unfinished = Path(folder, target.name)
            if kind == "dcp":
                files = write_dcp(shown, unfinished)
            elif kind == "torch":
                files = write_torch_file(shown, unfinished)
            else:
                files = write_safetensors(shown, unfinished, limit)
            if check:
                _require_equal(entries, unfinished, source.path)
            unfinished.rename(target)
    except (OSError, RuntimeError) as error:  # torch's writer raises the second after the first
        told = write_error(error, target, sum(each.nbytes for each in entries))
        raise ConvertError(f"{target} cannot be written: {told}") from error
    return Conversion(source=source, target=kind, files=tuple(files), checked=check)


def _require_equal(entries: Sequence[Entry], written: Path, source: Path) -> None:
    back = {each.name: each for each in open_checkpoint(written).entries}
    for each in entries:
        if each.name not in back or not _equal(each.read(), back[each.name].read()):
            raise ConvertError(
                f"{each.name} was read back and is not equal to that of {source}; try again"
            )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether both are equal to the bit, NaN included."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    pair = (each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(*pair)

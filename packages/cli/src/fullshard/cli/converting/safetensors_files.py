"""Safetensors: one file, or several with an index; read and written by byte ranges."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from fullshard.checkpoint import WeightsError
from fullshard.checkpoint.spi import (
    DTYPE_NAMES,
    INDEX,
    SINGLE,
    Box,
    Reader,
    header_bytes,
    read_set,
)
from fullshard.cli.converting.entry import Checkpoint, ConvertError, Entry, one_of_each

__all__ = ["is_safetensors", "open_safetensors", "write_safetensors"]

_BUFFER = 16 * 2**20  # bytes


def is_safetensors(path: Path) -> bool:
    """Return whether ``path`` is a safetensors file, an index, or a folder with either."""
    if path.is_dir():
        return any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json"))
    return path.name.endswith((".safetensors", ".safetensors.index.json"))


def open_safetensors(path: Path) -> Checkpoint:
    """Return the tensors of a set; their checksums, if it has some, are checked on reading.

    Raises:
        ConvertError: if the files cannot be read, or a tensor has a dtype that torch lacks.
    """
    try:
        stored = read_set(path, checksums=True).tensors
    except (OSError, WeightsError) as error:
        raise ConvertError(str(error)) from error
    reader = Reader(_BUFFER)

    def read(name: str) -> torch.Tensor:
        tensor = stored[name]
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        try:
            reader.read(tensor, Box.whole(tensor.shape), whole)
        except (OSError, WeightsError) as error:
            raise ConvertError(str(error)) from error
        return whole

    entries = []
    for name, tensor in stored.items():
        if tensor.dtype is None:
            raise ConvertError(f"{path}: {name} has the dtype {tensor.dtype_name}, unknown here")
        entries.append(
            Entry(name=name, shape=tensor.shape, dtype=tensor.dtype, read=partial(read, name))
        )
    return Checkpoint(path=path, format="safetensors", entries=one_of_each(entries, path))


def write_safetensors(entries: Sequence[Entry], path: Path, limit: int) -> list[str]:
    """Write one file, or files of at most ``limit`` bytes and their index, into a new folder.

    Args:
        entries: what to write.
        path: a folder, or a file if it ends with ``.safetensors``.
        limit: bytes of tensors in one file of a folder; a larger tensor has a file of its own.

    Returns:
        The names of the files.

    Raises:
        ConvertError: if a dtype has no name in the format.
    """
    if unknown := [each for each in entries if each.dtype not in DTYPE_NAMES]:
        raise ConvertError(
            f"{unknown[0].name} is {unknown[0].dtype}, which safetensors does not have; use --dtype"
        )
    if path.suffix == ".safetensors":
        _write_file(entries, path)
        return [path.name]
    path.mkdir(parents=True)
    parts = _parts(entries, limit)
    if len(parts) == 1:
        _write_file(entries, path / SINGLE)
        return [SINGLE]
    names: list[str] = []
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        names.append(f"model-{number:05}-of-{len(parts):05}.safetensors")
        weight_map |= dict.fromkeys((each.name for each in part), names[-1])
        _write_file(part, path / names[-1])
    total = sum(each.nbytes for each in entries)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / INDEX).write_text(json.dumps(index, indent=2, ensure_ascii=False))
    return [*names, INDEX]


def _parts(entries: Sequence[Entry], limit: int) -> list[list[Entry]]:
    parts: list[list[Entry]] = [[]]
    room = limit
    for each in entries:
        if each.nbytes > room and parts[-1]:
            parts.append([])
            room = limit
        parts[-1].append(each)
        room -= each.nbytes
    return parts


def _write_file(entries: Sequence[Entry], path: Path) -> None:
    described = {each.name: (each.dtype, each.shape) for each in entries}
    buffer = bytearray(_BUFFER)
    staged = torch.frombuffer(buffer, dtype=torch.uint8)
    with path.open("wb") as file:
        file.write(header_bytes(described, {"format": "pt"}))
        for each in entries:
            data = each.read().contiguous().reshape(-1).view(torch.uint8)
            for piece in data.split(_BUFFER):
                staged[: piece.numel()].copy_(piece)
                file.write(memoryview(buffer)[: piece.numel()])

"""The header of a safetensors file: its length in 8 bytes, then names, dtypes, shapes and offsets.

Owns reading one with all checks, and writing one. The format is that of the safetensors README. The
library itself maps files into memory and does not report offsets, so the bytes that it reads cannot
be counted; here the offsets are what is wanted.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint.files.checksums import KEY, Checksums, checksums_of

__all__ = ["DTYPE_NAMES", "Header", "Stored", "WeightsError", "header_bytes", "read_header"]

DTYPES = {
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "U8": torch.uint8,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""What the format calls each dtype."""

_LENGTH = 8  # bytes of the number that gives the length of the header
_LONGEST = 100_000_000  # bytes of a header that the safetensors library reads


class WeightsError(ValueError):
    """Files of weights that cannot be read, or do not fit the model; raised on every rank."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Attributes:
        name: its name in the file.
        path: the file.
        dtype: None: one that torch, or this package, does not know.
        dtype_name: what the file calls it.
        shape: of the whole tensor.
        start: where in the file its first byte is.
        checksums: of its chunks; None: the file has none for it.
    """

    name: str
    path: Path
    dtype: torch.dtype | None
    dtype_name: str
    shape: tuple[int, ...]
    start: int
    checksums: Checksums | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor; 0 for a dtype that is not known."""
        return 0 if self.dtype is None else math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """The header of a file.

    Attributes:
        tensors: by name.
        metadata: the user's text.
        nbytes: how long it is, its own length included.
    """

    tensors: dict[str, Stored]
    metadata: dict[str, str]
    nbytes: int


def read_header(path: Path, *, checksums: bool = False) -> Header:
    """Return the header of the file at ``path``.

    Args:
        path: of a safetensors file.
        checksums: also read the checksums of its tensors.

    Raises:
        OSError: if it cannot be read.
        WeightsError: if it is no safetensors file, or is cut short.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(_LENGTH), "little") if size >= _LENGTH else size
        if length > min(size - _LENGTH, _LONGEST):
            raise WeightsError(
                f"{path} has {size} bytes, and its first 8 say that its header has {length}: it is "
                "cut short, or no safetensors file; copy it again"
            )
        text = _read_all(file.fileno(), length)
    try:
        described = json.loads(text.decode(), object_pairs_hook=_unique)
        metadata = dict(described.pop("__metadata__", {}))
        tensors = {
            name: _stored(path, name, said, _LENGTH + length) for name, said in described.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WeightsError(
            f"{path} has no header as safetensors files have: {error}; pass a safetensors file"
        ) from error
    _check_ends(
        path, size - _LENGTH - length, [said["data_offsets"] for said in described.values()]
    )
    if checksums:
        tensors = _with_checksums(path, tensors, described, metadata.get(KEY))
    return Header(tensors, metadata, _LENGTH + length)


def _with_checksums(
    path: Path, tensors: Mapping[str, Stored], described: Mapping[str, Any], text: str | None
) -> dict[str, Stored]:
    ends = {name: told["data_offsets"] for name, told in described.items()}
    nbytes = {name: int(end) - int(start) for name, (start, end) in ends.items()}
    try:
        found = checksums_of(text, nbytes)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WeightsError(
            f"{path} has checksums in its metadata that cannot be read ({error}); copy it again, "
            "or pass LoadOptions(checksums=False) to load it without checks"
        ) from error
    return {name: replace(stored, checksums=found.get(name)) for name, stored in tensors.items()}


def _read_all(fd: int, length: int) -> bytes:
    parts = []
    while length > 0 and (part := os.read(fd, length)):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it names {next(n for n in names if names.count(n) > 1)} twice")
    return found


def _stored(path: Path, name: str, said: Any, data: int) -> Stored:
    shape, (start, end) = tuple(map(int, said["shape"])), map(int, said["data_offsets"])
    dtype = DTYPES.get(said["dtype"])
    if dtype is not None and end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} is {said['dtype']} of shape {shape} in {end - start} bytes")
    return Stored(name, path, dtype, str(said["dtype"]), shape, data + start)


def _check_ends(path: Path, size: int, offsets: Sequence[Sequence[int]]) -> None:
    """Return if tensors follow each other without a gap up to the end of the file."""
    at = 0
    for start, end in sorted(map(tuple, offsets)):
        if start != at:
            raise WeightsError(f"{path}: byte {at} of its data belongs to no tensor, or to two")
        at = end
    if at != size:
        raise WeightsError(
            f"{path} is cut short, or has too much: its tensors have {at} bytes, and it has {size} "
            "after its header; copy it again"
        )


def header_bytes(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> bytes:
    """Return the header of a file that holds ``tensors`` in sequence.

    Args:
        tensors: dtype and shape by name, in the order of the file.
        metadata: text for readers of the file.
    """
    described: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * dtype.itemsize
        described[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that data begins at a multiple of 8
    return len(text).to_bytes(_LENGTH, "little") + text

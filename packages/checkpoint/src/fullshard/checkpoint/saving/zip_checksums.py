"""The checksum of a file of ``torch.distributed.checkpoint``, without reading its tensors again.

Such a file is a row of zips, one for each part of a tensor, and torch's writer computes the CRC-32
of each record in them. ``checksum_of_zips`` joins these with the checksums of the bytes between,
as zlib's ``crc32_combine`` does, which Python does not have.
"""

from __future__ import annotations

import functools
import io
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import torch

__all__ = ["checksum_of_zips"]

_LARGE = 2**20  # bytes; a smaller zip is read in less time than its directory
_AT_ONCE = 2**24  # bytes
_ONES = 2**32 - 1
_LOCAL_HEADER = 30  # bytes; the lengths of name and extra field are its last four


def checksum_of_zips(path: Path, zips: Iterable[tuple[int, int]]) -> int:
    """Return the CRC-32 of a file.

    Args:
        path: the file.
        zips: the first byte and the length of each zip in it, as torch has just written them.
    """
    found = at = 0
    large = [each for each in zips if each[1] >= _LARGE]
    if not torch.serialization.get_crc32_options():
        large = []  # the user turned checksums off in torch
    with path.open("rb") as file:
        for start, length, crc in sorted(each for one in large for each in _records(file, *one)):
            found = _joined(_crc(file, at, start, found), crc, length)
            at = start + length
        return _crc(file, at, os.fstat(file.fileno()).st_size, found)


def _records(file: BinaryIO, first: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Yield first byte, length and CRC-32 of the large records of a zip inside ``file``."""
    with zipfile.ZipFile(_Part(file, first, length)) as archive:
        for info in archive.infolist():
            if info.compress_type == zipfile.ZIP_STORED and info.file_size >= _LARGE // 2:
                file.seek(first + info.header_offset)
                header = file.read(_LOCAL_HEADER)
                sizes = [int.from_bytes(header[at : at + 2], "little") for at in (26, 28)]
                start = first + info.header_offset + _LOCAL_HEADER + sum(sizes)
                yield start, info.file_size, info.CRC


class _Part(io.RawIOBase):
    """A range of a file, as a file."""

    def __init__(self, file: BinaryIO, first: int, length: int) -> None:
        self._file, self._first, self._length, self._at = file, first, length, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = (0, self._at, self._length)[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._first + self._at)
        found = self._file.read(left if size < 0 else min(size, left))
        self._at += len(found)
        return found


def _crc(file: BinaryIO, start: int, end: int, before: int) -> int:
    """Return the CRC-32 of the bytes before, and of the bytes from ``start`` to ``end``."""
    file.seek(start)
    while start < end:
        part = file.read(min(_AT_ONCE, end - start))
        start, before = start + len(part), zlib.crc32(part, before)
        if not part:
            raise OSError(f"the file ends at byte {start}, and {end} were written")
    return before


def _joined(before: int, crc: int, length: int) -> int:
    """Return the CRC-32 of bytes with ``before``, followed by ``length`` bytes with ``crc``."""
    return _product(_zeros(length), before) ^ crc


@functools.lru_cache(maxsize=256)
def _zeros(length: int) -> tuple[int, ...]:
    """Return what ``length`` zero bytes make of each bit of a CRC-32: a matrix over two numbers."""
    if length < 2:
        return tuple(zlib.crc32(bytes(length), 1 << bit ^ _ONES) ^ _ONES for bit in range(32))
    half = _zeros(length // 2)
    rest = _zeros(length - length // 2)
    return tuple(_product(rest, each) for each in half)


def _product(matrix: tuple[int, ...], bits: int) -> int:
    found = 0
    for column in matrix:
        if bits & 1:
            found ^= column
        bits >>= 1
    return found

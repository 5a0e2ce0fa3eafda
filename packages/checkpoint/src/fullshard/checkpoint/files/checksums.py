"""Checksums of stored tensors: one CRC-32 for each chunk of a tensor's bytes.

Owns their text in the metadata of a safetensors file, and the sums of bytes that arrive in pieces.
``reading`` compares them. Each rank reads its own part of a tensor, so a sum of the whole tensor
would tell no rank whether its bytes are right; a chunk is small enough to be read whole.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = [
    "CHUNK",
    "KEY",
    "Checksums",
    "PartialSum",
    "Sums",
    "blank",
    "checksum_text",
    "checksums_of",
    "joined",
]

KEY = "fullshard.crc32"
"""The key in a file's metadata. Other readers of safetensors leave it alone."""

CHUNK = 256 * 1024
"""Bytes of a chunk; 32 characters of metadata for a MiB."""

_DIGITS = 8  # of a CRC-32 in hexadecimal


@dataclass(frozen=True)
class Checksums:
    """The checksums of one tensor.

    Attributes:
        chunk: bytes of a chunk; the last one of a tensor may be shorter.
        text: hexadecimal digits, 8 for each chunk: ``zlib.crc32`` of its bytes.
    """

    chunk: int
    text: str

    def of(self, index: int) -> int:
        """Return the checksum of chunk ``index``."""
        return int(self.text[index * _DIGITS : (index + 1) * _DIGITS], 16)


def checksum_text(sums: Mapping[str, str]) -> str:
    """Return the metadata of a file whose tensors have these checksums."""
    return json.dumps({"chunk": CHUNK, "tensors": dict(sums)}, separators=(",", ":"))


def checksums_of(text: str | None, nbytes: Mapping[str, int]) -> dict[str, Checksums]:
    """Return the checksums of tensors by name; a tensor without any is left out.

    Args:
        text: the metadata of the file; None: there is none.
        nbytes: how long each tensor of the file is.

    Raises:
        ValueError: if it is no such metadata, or a tensor has another number of chunks.
    """
    if text is None:
        return {}
    told = json.loads(text)
    chunk, found = int(told["chunk"]), dict(told["tensors"])
    if chunk < 1:
        raise ValueError(f"chunks of {chunk} bytes")
    sums = {name: Checksums(chunk, str(found[name])) for name in nbytes if name in found}
    for name, each in sums.items():
        count = -(-nbytes[name] // chunk)
        if len(each.text) != count * _DIGITS:
            raise ValueError(f"{name} has {count} chunks, and {len(each.text)} digits")
        int(each.text or "0", 16)
    return sums


def blank(nbytes: int) -> str:
    """Return text as long as the checksums of a tensor of ``nbytes``."""
    return "0" * (-(-nbytes // CHUNK) * _DIGITS)


PartialSum = tuple[int, int, int]
"""Neighbouring bytes inside one chunk: where they begin in the tensor, how many, and their sum."""


class Sums:
    """The checksums of tensors whose bytes this rank writes, in any order."""

    def __init__(self) -> None:
        """Start without any."""
        self._pieces: dict[tuple[int, str], list[PartialSum]] = {}

    def add(self, file: int, name: str, start: int, content: memoryview) -> None:
        """Add the bytes of a tensor from byte ``start`` on."""
        pieces = self._pieces.setdefault((file, name), [])
        while content:
            part = content[: CHUNK - start % CHUNK]
            if pieces and start % CHUNK and sum(pieces[-1][:2]) == start:
                first, length, before = pieces.pop()
                pieces.append((first, length + len(part), zlib.crc32(part, before)))
            else:
                pieces.append((start, len(part), zlib.crc32(part)))
            content, start = content[len(part) :], start + len(part)

    def of(self, file: int) -> dict[str, list[PartialSum]]:
        """Return what was added of a file, by tensor."""
        return {name: pieces for (number, name), pieces in self._pieces.items() if number == file}


def joined(pieces: Iterable[PartialSum]) -> str:
    """Return the checksums of a tensor as text, of all of its pieces."""
    sums: dict[int, int] = {}
    for start, length, part in sorted(pieces):
        before = sums.get(start // CHUNK)
        if before is not None:
            # CRC-32 is affine: after the same bytes, two sums differ as they do after zeros
            zeros = bytes(length)
            part ^= zlib.crc32(zeros, before) ^ zlib.crc32(zeros)
        sums[start // CHUNK] = part
    return "".join(f"{sums[index]:0{_DIGITS}x}" for index in sorted(sums))

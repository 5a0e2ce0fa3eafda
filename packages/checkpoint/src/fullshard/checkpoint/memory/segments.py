"""Segments: files in memory, each with the shards of one rank after one step.

Owns the bytes of a segment, its manifest and its checksum. A ``Slot`` is a segment that this
process writes, again and again: its memory is allocated once. [Note: sealed] A segment counts from
the moment in which its manifest is renamed into place, and a slot removes the manifest before it
changes a byte. A process that is killed while it writes leaves no manifest.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import pickle
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from fullshard.checkpoint.files.write_errors import write_error

__all__ = ["Entry", "Manifest", "Slot", "allocated", "checksum", "map_segment", "read_manifest"]

_MAGIC = b"fullshard segment 1\n"
_GRANULE = 1 << 20  # bytes; what is pickled may grow a little from save to save
_DIGEST = 16


@dataclass(frozen=True)
class Entry:
    """Where a part of a tensor, or a value that is no tensor, is in a segment.

    Attributes:
        index: the name, and for a tensor the offset of the part.
        chunk: which part of the tensor it is; None: it is one of the pickled values.
        size: shape of the whole tensor.
        dtype: of the elements; None: the part is pickled.
        start: first byte.
        nbytes: how many.
    """

    index: MetadataIndex
    chunk: ChunkStorageMetadata | None
    size: torch.Size
    dtype: torch.dtype | None
    start: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A description of a segment.

    Attributes:
        attempt: how often the run was started before, plus one.
        token: a random name of the attempt.
        number: of the save, counted by the attempt; a step may be saved twice.
        step: after which it was saved.
        rank: which saved it.
        ranks: how many saved.
        nbytes: of the segment.
        checksum: of the segment.
        entries: parts of tensors, and values.
    """

    attempt: int
    token: str
    number: int
    step: int
    rank: int
    ranks: int
    nbytes: int
    checksum: int
    entries: tuple[Entry, ...]

    def packed(self) -> bytes:
        """Return it as the contents of a file."""
        body = pickle.dumps(self)
        return _MAGIC + hashlib.blake2b(body, digest_size=_DIGEST).digest() + body

    @classmethod
    def unpacked(cls, content: bytes) -> Manifest | None:
        """Return what ``packed`` was called of; None if ``content`` is damaged."""
        head = len(_MAGIC) + _DIGEST
        body = content[head:]
        if content[:head] != _MAGIC + hashlib.blake2b(body, digest_size=_DIGEST).digest():
            return None
        found: Manifest = pickle.loads(body)
        return found


def read_manifest(path: Path) -> Manifest | None:
    """Return the manifest in a file; None if it is damaged, or not there any more."""
    try:
        return Manifest.unpacked(path.read_bytes())
    except OSError:
        return None


def checksum(content: torch.Tensor) -> int:
    """Return the CRC-32 of ``content``, bytes."""
    return zlib.crc32(content.numpy().data)


def map_segment(path: Path) -> torch.Tensor:
    """Return the bytes of a segment, mapped; the caller must not write to them."""
    populated = getattr(mmap, "MAP_POPULATE", 0)  # one call in place of a fault for each page
    with path.open("r+b") as file:  # torch warns of memory that cannot be written to
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | populated)
    return torch.frombuffer(mapped, dtype=torch.uint8)


class Slot:
    """A segment that this process writes.

    Args:
        path: the file; its manifest has the suffix ``.manifest``.
    """

    def __init__(self, path: Path) -> None:
        """Take the path; nothing is allocated yet."""
        self.path = path
        self._bytes = torch.empty(0, dtype=torch.uint8)

    @property
    def manifest(self) -> Path:
        """The path of the manifest."""
        return self.path.with_name(f"{self.path.name}.manifest")

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return the first ``nbytes`` bytes, mapped; there may be older contents in them.

        Raises:
            OSError: if there is no room.
        """
        if nbytes > self._bytes.numel():
            size = allocated(nbytes)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(descriptor, 0, size)  # a hole would end the process later
                else:
                    os.ftruncate(descriptor, size)
                self._bytes = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
            except OSError as error:
                raise write_error(error, self.path, size) from error
            finally:
                os.close(descriptor)
        return self._bytes[:nbytes]

    def unseal(self) -> None:
        """Remove the manifest: what follows changes the bytes."""
        self.manifest.unlink(missing_ok=True)

    def seal(self, manifest: bytes) -> None:
        """Put the manifest in place; see [Note: sealed]."""
        partial = self.path.with_name(f"{self.path.name}.partial")
        try:
            partial.write_bytes(manifest)
        except OSError as error:
            raise write_error(error, partial, len(manifest)) from error
        partial.replace(self.manifest)


def allocated(nbytes: int) -> int:
    """Return how many bytes a slot takes for a segment of ``nbytes``."""
    return max(1, -(-nbytes // _GRANULE)) * _GRANULE

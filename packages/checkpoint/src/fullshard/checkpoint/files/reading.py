"""Read boxes of stored tensors by byte ranges, through one buffer, and count every byte.

``Reader`` decides which ranges are requested. A box in one run is read as one range, and so is a
box of many short runs with short gaps: a request costs as much as some 16 KiB. Long runs are
requested one by one. The reader compares the chunks with their checksums.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch

from fullshard.checkpoint.boxes import Box
from fullshard.checkpoint.files.checksums import Checksums
from fullshard.checkpoint.files.headers import Stored, WeightsError
from fullshard.checkpoint.files.runs import divided, run_starts, runs_of, span_of

__all__ = ["FRAGMENT", "Reader", "bytes_from_device"]

FRAGMENT = 16 * 1024
"""Bytes below which a request costs more than what it brings."""

_SPARSE = 8  # a range may be this many times as long as the bytes that are needed


class Reader:
    """Reads from files that stay open until it is closed.

    Attributes:
        memory: the buffer, bytes on the CPU.
        requested: bytes that were asked for.
        beyond: additional bytes that were read, to check whole chunks.
    """

    def __init__(self, buffer_bytes: int) -> None:
        """Allocate the buffer."""
        self._bytes = bytearray(buffer_bytes)
        self.memory = torch.frombuffer(self._bytes, dtype=torch.uint8)
        self.requested = self.beyond = 0
        self._checked: set[tuple[Path, str, int]] = set()
        self._rest = bytearray()  # the bytes of a chunk that were not requested
        self._files: dict[Path, int] = {}
        self._open = ExitStack()

    def close(self) -> None:
        """Close all files."""
        self._open.close()

    def read(self, stored: Stored, box: Box, into: torch.Tensor, limit: int = 0) -> None:
        """Read ``box`` of ``stored`` into ``into``, with a cast if its dtype is another.

        Args:
            stored: the tensor.
            box: the part of it.
            into: of the box's shape, on any device.
            limit: bytes of the buffer to use; 0: all.

        Raises:
            OSError: if the file cannot be read, or ends before.
            WeightsError: if a chunk of the tensor does not have its checksum.
        """
        assert stored.dtype is not None, "it was matched"
        limit = limit or len(self._bytes)
        size = stored.dtype.itemsize
        together = _is_dense(box, stored.shape, size)

        def cost(part: Box) -> int:
            return size * (span_of(part, stored.shape)[1] if together else part.numel)

        for part in divided(box, cost, limit):
            found = self._span(stored, part) if together else self._runs(stored, part)
            part.of(into, box).copy_(found)

    def _span(self, stored: Stored, part: Box) -> torch.Tensor:
        """Return ``part``, read together with the gaps between its elements."""
        assert stored.dtype is not None, "it was matched"
        first, length = span_of(part, stored.shape)
        nbytes = length * stored.dtype.itemsize
        self._request(stored, first, 0, nbytes)
        strides = torch.empty(stored.shape, device="meta").stride()
        return self.memory[:nbytes].view(stored.dtype).as_strided(part.size, strides)

    def _runs(self, stored: Stored, part: Box) -> torch.Tensor:
        """Return ``part``, whose runs are read one by one."""
        assert stored.dtype is not None, "it was matched"
        _, length = runs_of(part, stored.shape)
        nbytes, at = length * stored.dtype.itemsize, 0
        for first in run_starts(part, stored.shape):
            self._request(stored, first, at, nbytes)
            at += nbytes
        return self.memory[:at].view(stored.dtype).view(part.size)

    def _request(self, stored: Stored, element: int, at: int, nbytes: int) -> None:
        """Read ``nbytes`` from ``element`` on to ``at`` in the buffer."""
        assert stored.dtype is not None, "it was matched"
        self.requested += nbytes
        first = element * stored.dtype.itemsize
        with memoryview(self._bytes) as whole, whole[at : at + nbytes] as wanted:
            self._fill(stored, first, wanted)
            if stored.checksums is not None:
                self._check(stored, stored.checksums, first, wanted)

    def _fill(self, stored: Stored, first: int, into: memoryview) -> None:
        """Read the bytes of ``stored`` from its byte ``first`` on."""
        offset, done, fd = stored.start + first, 0, self._file(stored.path)
        while done < len(into):
            with into[done:] as left:
                got = os.preadv(fd, [left], offset + done)
            if got == 0:
                raise OSError(f"{stored.path} ends at byte {offset + done}, inside {stored.name}")
            done += got

    def _check(self, stored: Stored, sums: Checksums, first: int, wanted: memoryview) -> None:
        """Compare the chunks that hold ``wanted`` with their checksums, each once.

        Args:
            stored: the tensor.
            sums: its checksums.
            first: the tensor's byte at which ``wanted`` begins.
            wanted: bytes that were read.

        Raises:
            WeightsError: if a chunk does not have its checksum.
        """
        end = first + len(wanted)
        for index in range(first // sums.chunk, -(-end // sums.chunk)):
            key = stored.path, stored.name, index
            if key in self._checked:
                continue
            self._checked.add(key)
            start, stop = index * sums.chunk, min((index + 1) * sums.chunk, stored.nbytes)
            found = self._sum_of(stored, start, first, 0)
            found = zlib.crc32(wanted[max(start - first, 0) : max(stop - first, 0)], found)
            found = self._sum_of(stored, end, stop, found)
            if found != sums.of(index):
                raise WeightsError(
                    f"{stored.path} is damaged in {stored.name}: bytes {stored.start + start} to "
                    f"{stored.start + stop} of the file have CRC-32 {found:08x}, and "
                    f"{sums.of(index):08x} was saved; copy the file again. If a program changed "
                    "the tensor and kept the file's metadata, pass LoadOptions(checksums=False)"
                )

    def _sum_of(self, stored: Stored, start: int, stop: int, found: int) -> int:
        """Return the checksum of what came before, and of bytes ``start`` to ``stop``."""
        if stop <= start:
            return found
        self.beyond += stop - start
        if len(self._rest) < stop - start:
            self._rest = bytearray(stop - start)
        with memoryview(self._rest) as whole, whole[: stop - start] as rest:
            self._fill(stored, start, rest)
            return zlib.crc32(rest, found)

    def _file(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._open.callback(os.close, self._files[path])
        return self._files[path]


def _is_dense(box: Box, shape: tuple[int, ...], itemsize: int) -> bool:
    """Return whether ``box`` is read in one range with its gaps."""
    count, length = runs_of(box, shape)
    if count <= 1 or box.numel == 0:
        return True
    span = span_of(box, shape)[1]
    return length * itemsize < FRAGMENT and span <= _SPARSE * box.numel


def bytes_from_device() -> int | None:
    """Return how many bytes a disk gave this process; None where the system does not tell."""
    for line in _lines(Path("/proc/self/io")):
        name, _, value = line.partition(":")
        if name == "read_bytes":
            return int(value)
    return None


def _lines(path: Path) -> Iterator[str]:
    try:
        yield from path.read_text().splitlines()
    except OSError:  # another system, or not allowed here
        return

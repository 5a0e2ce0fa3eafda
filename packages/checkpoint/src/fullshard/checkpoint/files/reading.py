"""Reads boxes of stored tensors by byte ranges, through one buffer, and counts every byte.

Owns which ranges are requested. A box that lies in one run is one range, and so is one of many
short runs with short gaps: a request costs as much as some 16 KiB. Long runs are requested one by
one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch

from fullshard.checkpoint.boxes import Box
from fullshard.checkpoint.files.headers import Stored
from fullshard.checkpoint.files.runs import divided, run_starts, runs_of, span_of

__all__ = ["FRAGMENT", "Reader", "bytes_from_device"]

FRAGMENT = 16 * 1024
"""Bytes below which a request costs more than what it brings."""

_SPARSE = 8  # a range may be this many times as long as what is wanted of it


class Reader:
    """Reads from files that stay open until it is closed.

    Attributes:
        memory: the buffer, bytes on the CPU.
        requested: bytes that were asked for.
    """

    def __init__(self, buffer_bytes: int) -> None:
        """Allocates the buffer."""
        self._bytes = bytearray(buffer_bytes)
        self.memory = torch.frombuffer(self._bytes, dtype=torch.uint8)
        self.requested = 0
        self._files: dict[Path, int] = {}
        self._open = ExitStack()

    def close(self) -> None:
        """Closes all files."""
        self._open.close()

    def read(self, stored: Stored, box: Box, into: torch.Tensor, limit: int = 0) -> None:
        """Reads ``box`` of ``stored`` into ``into``, with a cast if its dtype is another.

        Args:
            stored: the tensor.
            box: the part of it.
            into: of the box's shape, on any device.
            limit: bytes of the buffer to use; 0: all.

        Raises:
            OSError: if the file cannot be read, or ends before.
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
        """Returns ``part``, read with what lies between its elements."""
        assert stored.dtype is not None, "it was matched"
        first, length = span_of(part, stored.shape)
        nbytes = length * stored.dtype.itemsize
        self._request(stored, first, 0, nbytes)
        strides = torch.empty(stored.shape, device="meta").stride()
        return self.memory[:nbytes].view(stored.dtype).as_strided(part.size, strides)

    def _runs(self, stored: Stored, part: Box) -> torch.Tensor:
        """Returns ``part``, whose runs are read one by one."""
        assert stored.dtype is not None, "it was matched"
        _, length = runs_of(part, stored.shape)
        nbytes, at = length * stored.dtype.itemsize, 0
        for first in run_starts(part, stored.shape):
            self._request(stored, first, at, nbytes)
            at += nbytes
        return self.memory[:at].view(stored.dtype).view(part.size)

    def _request(self, stored: Stored, element: int, at: int, nbytes: int) -> None:
        """Reads ``nbytes`` from ``element`` on to ``at`` in the buffer."""
        assert stored.dtype is not None, "it was matched"
        self.requested += nbytes
        offset = stored.start + element * stored.dtype.itemsize
        fd = self._file(stored.path)
        with memoryview(self._bytes) as whole, whole[at : at + nbytes] as rest:
            done = 0
            while done < nbytes:
                with rest[done:] as left:
                    got = os.preadv(fd, [left], offset + done)
                if got == 0:
                    raise OSError(
                        f"{stored.path} ends at byte {offset + done}, inside {stored.name}"
                    )
                done += got

    def _file(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._open.callback(os.close, self._files[path])
        return self._files[path]


def _is_dense(box: Box, shape: tuple[int, ...], itemsize: int) -> bool:
    """Tells whether ``box`` is read in one range with its gaps."""
    count, length = runs_of(box, shape)
    if count <= 1 or box.numel == 0:
        return True
    span = span_of(box, shape)[1]
    return length * itemsize < FRAGMENT and span <= _SPARSE * box.numel


def bytes_from_device() -> int | None:
    """Returns how many bytes a disk gave this process; None where the system does not tell."""
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

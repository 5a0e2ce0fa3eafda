"""Space in a file of this process without a name: what is in it, and who has which part.

``FileSpace`` is the main class. The file is unlinked right after it is opened: no other run can
change the file, and the system frees its space when the process ends, also after a kill.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ALIGNMENT", "Extent", "FileSpace", "aligned"]

ALIGNMENT = 4096
"""Bytes: what ``O_DIRECT`` asks of addresses, offsets and sizes, on all usual file systems."""


def aligned(nbytes: int) -> int:
    """Return ``nbytes``, rounded up to a multiple of ``ALIGNMENT``."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Extent:
    """A part of the file.

    Attributes:
        offset: its first byte; a multiple of ``ALIGNMENT``.
        nbytes: its size in bytes; a multiple of ``ALIGNMENT``.
    """

    offset: int
    nbytes: int


class FileSpace:
    """A file without a name, and its parts that are in use.

    Attributes:
        fd: its descriptor, which ``close`` closes, at the latest when the object is freed.
        direct: whether reads and writes pass the system's page cache by (``O_DIRECT``).
        nbytes: the space that is reserved on the disk, in bytes.
    """

    def __init__(
        self, folder: Path, *, prefix: str, direct: bool, capacity: int | None = None
    ) -> None:
        """Make the file, which takes no space until ``reserve``.

        Args:
            folder: an existing folder.
            prefix: how the name begins that the file has for a moment.
            direct: pass the page cache by where the file system allows that.
            capacity: its largest size, in bytes; None: as large as the disk allows.

        Raises:
            OSError: if the file cannot be made.
        """
        self.fd, self.direct = _open_unnamed(folder, prefix, direct)
        self.nbytes = 0
        self._capacity = capacity
        self._spare: dict[int, list[Extent]] = {}  # given back, by size
        self._lock = threading.RLock()  # a finalizer may give back during ``reserve``
        self.close = weakref.finalize(self, os.close, self.fd)

    def reserve(self, nbytes: int) -> Extent:
        """Return an extent of at least ``nbytes``, for which the disk has space from now on.

        Raises:
            OSError: if the disk has none.
        """
        size = aligned(nbytes)
        with self._lock:
            if self._spare.get(size):
                return self._spare[size].pop()
            if self._capacity is not None and self.nbytes + size > self._capacity:
                raise OSError(errno.EFBIG, f"the file was made for {self._capacity} bytes")
            os.posix_fallocate(self.fd, self.nbytes, size)
            extent = Extent(self.nbytes, size)
            self.nbytes += size
            return extent

    @property
    def spare_bytes(self) -> int:
        """Reserved bytes that no tensor has."""
        with self._lock:
            return sum(size * len(extents) for size, extents in self._spare.items())

    def give_back(self, extent: Extent) -> None:
        """Let another tensor of the same size have ``extent``."""
        with self._lock:
            self._spare.setdefault(extent.nbytes, []).append(extent)


def _open_unnamed(folder: Path, prefix: str, direct: bool) -> tuple[int, bool]:
    """Return the descriptor of a new file without a name, and whether it passes the cache by."""
    fd, name = tempfile.mkstemp(prefix=prefix, dir=folder)
    try:
        flag = getattr(os, "O_DIRECT", 0)
        if direct and flag:
            try:
                again = os.open(name, os.O_RDWR | os.O_CLOEXEC | flag)
            except OSError as error:
                if error.errno != errno.EINVAL:  # this file system has no direct I/O
                    raise
            else:
                os.close(fd)
                return again, True
    except BaseException:
        os.close(fd)
        raise
    finally:
        os.unlink(name)
    return fd, False

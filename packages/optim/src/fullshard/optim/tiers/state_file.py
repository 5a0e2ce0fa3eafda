"""One file of this rank that holds optimizer state: space, reads and writes in the background.

``StateFile`` is the main class. The file is unlinked right after it is opened: no other run can
change the file, and the system frees its space when the process ends, also after a kill.
ZeRO-Infinity (S. Rajbhandari et al., arXiv 2104.07857) introduced state on NVMe. ``staging`` moves
tensors through this file; ``offloaded`` decides which tensors, and when.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["ALIGNMENT", "Extent", "StateFile", "aligned", "joined"]

ALIGNMENT = 4096
"""Bytes: what ``O_DIRECT`` asks of addresses, offsets and sizes, on all usual file systems."""

_PIECE = 8 << 20  # bytes that one thread moves in one call


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


class StateFile:
    """A file without a name, and the threads that read and write it.

    Attributes:
        folder: the folder of the file.
        direct: whether reads and writes pass the system's page cache by (``O_DIRECT``).
        memory: the whole file as bytes, ``[capacity]`` uint8, mapped. A page is read from the file
            when it is touched, and the system may drop it again.
        bytes_read: bytes read so far, by ``read``.
        bytes_written: bytes written so far, by ``write``.
    """

    def __init__(self, folder: Path, capacity: int, *, threads: int, direct: bool) -> None:
        """Make the file, which takes no space until ``reserve``.

        Args:
            folder: an existing folder, or one that can be made.
            capacity: its largest size, in bytes.
            threads: how many reads and writes run at once.
            direct: pass the page cache by where the file system allows that.

        Raises:
            OSError: if the folder or the file cannot be made.
        """
        self.folder = folder
        self._capacity = aligned(max(capacity, 1))
        self._fd, self.direct = _open_unnamed(folder, direct)
        try:
            os.ftruncate(self._fd, self._capacity)
            self._mapped = mmap.mmap(self._fd, self._capacity)
        except BaseException:
            os.close(self._fd)
            raise
        self.memory = torch.frombuffer(self._mapped, dtype=torch.uint8)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fullshard-state")
        self._end = 0
        self._spare: dict[int, list[Extent]] = {}  # given back, by size
        self.bytes_read = self.bytes_written = 0
        self.close = weakref.finalize(self, _close, self._fd, self._pool)

    def reserve(self, nbytes: int) -> Extent:
        """Return an extent of at least ``nbytes``, for which the disk has space from now on.

        Raises:
            OSError: if the disk has none.
        """
        size = aligned(nbytes)
        if self._spare.get(size):
            return self._spare[size].pop()
        if self._end + size > self._capacity:
            raise OSError(errno.EFBIG, f"the file was made for {self._capacity} bytes")
        os.posix_fallocate(self._fd, self._end, size)
        extent = Extent(self._end, size)
        self._end += size
        return extent

    def give_back(self, extent: Extent) -> None:
        """Let another tensor of the same size have ``extent``."""
        self._spare.setdefault(extent.nbytes, []).append(extent)

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return True: the file is for state on any device."""
        return True

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return bytes of the mapped file, ``[nbytes]`` uint8, as a storage by themselves.

        ``torch.save`` and ``copy.deepcopy`` take whole storages: here not that of the whole file.
        """
        return torch.frombuffer(self._mapped, dtype=torch.uint8, count=nbytes, offset=offset)

    def read(self, extents: Sequence[Extent], into: torch.Tensor) -> list[Future[None]]:
        """Begin to fill ``into``, ``[n]`` uint8, with the extents, one after the other."""
        self.bytes_read += sum(extent.nbytes for extent in extents)
        return self._move(os.preadv, extents, into)

    def write(self, extents: Sequence[Extent], data: torch.Tensor) -> list[Future[None]]:
        """Begin to write ``data``, ``[n]`` uint8, to the extents, one after the other."""
        self.bytes_written += sum(extent.nbytes for extent in extents)
        return self._move(os.pwritev, extents, data)

    def after(self, moves: Sequence[Future[None]], call: Callable[[], None]) -> Future[None]:
        """Call a function on a thread when ``moves`` are over, unless one of them failed."""
        begun = list(moves)
        return self._pool.submit(lambda: None if any(m.exception() for m in begun) else call())

    def _move(
        self, call: Callable[..., int], extents: Sequence[Extent], memory: torch.Tensor
    ) -> list[Future[None]]:
        address, moved = memory.data_ptr(), []
        for offset, nbytes in joined(extents):
            for start in range(0, nbytes, _PIECE):
                size = min(_PIECE, nbytes - start)
                piece = (call, self._fd, offset + start, address + start, size)
                moved.append(self._pool.submit(_move_piece, *piece))
            address += nbytes
        return moved


def joined(extents: Sequence[Extent]) -> list[tuple[int, int]]:
    """Return offset and size of each run of extents that follow one another in the file."""
    runs: list[tuple[int, int]] = []
    for extent in extents:
        if runs and sum(runs[-1]) == extent.offset:
            runs[-1] = (runs[-1][0], runs[-1][1] + extent.nbytes)
        else:
            runs.append((extent.offset, extent.nbytes))
    return runs


def _move_piece(call: Callable[..., int], fd: int, offset: int, address: int, nbytes: int) -> None:
    """Read or write ``nbytes`` at ``address``; a call may move fewer bytes than asked."""
    memory = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
    done = 0
    while done < nbytes:
        moved = call(fd, [memory[done:]], offset + done)
        if moved <= 0:
            raise OSError(errno.EIO, f"the file ends at byte {offset + done}")
        done += moved


def _open_unnamed(folder: Path, direct: bool) -> tuple[int, bool]:
    """Return the descriptor of a new file without a name, and whether it passes the cache by."""
    folder.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(prefix="fullshard-state-", dir=folder)
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


def _close(fd: int, pool: ThreadPoolExecutor) -> None:
    pool.shutdown()
    os.close(fd)

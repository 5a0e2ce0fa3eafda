"""Shared memory of several processes on one host, and the place of the next collective there.

Owns: segments and the ring of regions in one. A segment has no name in any file system (memfd):
other ranks open it through ``/proc``, and the kernel frees it with the last process that maps it,
however that process ends. Its pages are there before anybody writes to them, and it cannot shrink:
too little memory is an error of ``make``, never a signal later. Refuses: knowing who may write.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch

from fullshard.samehost.pages import give_back_pages

__all__ = ["Ring", "SegmentFile", "aligned", "map_segment"]

_ALIGNMENT = 64  # bytes: a cache line
_BLOCK = 512  # bytes, in which the system counts the memory of a file


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up, so that what follows starts on a cache line of its own."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """An open segment: its descriptor in this process, and its identity."""

    fd: int
    inode: int

    @classmethod
    def make(cls, nbytes: int, spare: float = 0.0, *, grows: bool = False) -> SegmentFile:
        """Make a segment of ``nbytes``, with every page allocated.

        Args:
            nbytes: its size.
            spare: part of the host's memory that it must leave.
            grows: whether it may be made larger.

        Raises:
            OSError: if there is not enough memory.
        """
        _require_memory(nbytes, spare)
        fd = os.memfd_create("fullshard", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            seals = fcntl.F_SEAL_SHRINK | (0 if grows else fcntl.F_SEAL_GROW)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            return cls(fd, os.fstat(fd).st_ino)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def open(cls, process: int, fd: int, inode: int) -> SegmentFile:
        """The one that ``process`` has as ``fd``.

        Raises:
            OSError: if it cannot be opened, or is another.
        """
        mine = os.open(f"/proc/{process}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(mine).st_ino != inode:
            os.close(mine)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return cls(mine, inode)

    def grow(self, nbytes: int, spare: float = 0.0) -> None:
        """Make it ``nbytes`` large, unless it is; what maps it stays right.

        Raises:
            OSError: if there is not enough memory; it stays as it is then.
        """
        missing = nbytes - os.fstat(self.fd).st_size
        if missing > 0:
            _require_memory(missing, spare)
            os.posix_fallocate(self.fd, 0, nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes now."""
        return os.fstat(self.fd).st_blocks * _BLOCK

    def hold(self) -> None:
        """Keep its pages until ``release``, whichever process gives them back."""
        fcntl.flock(self.fd, fcntl.LOCK_SH)

    def release(self, *, free_pages: bool) -> None:
        """End ``hold``. With ``free_pages``, give the pages back if no process holds them.

        The system decides who is the last, so processes need not tell each other. If two processes
        are last at once, one of the two frees the pages.
        """
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        if not free_pages:
            return
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                give_back_pages(self.fd)
            finally:
                fcntl.flock(self.fd, fcntl.LOCK_UN)

    def again(self) -> SegmentFile:
        """The same segment by another descriptor, to be closed by itself."""
        return SegmentFile(os.dup(self.fd), self.inode)

    def close(self) -> None:
        """Close the descriptor; mappings stay."""
        os.close(self.fd)


def map_segment(file: SegmentFile) -> torch.Tensor:
    """Return all bytes of a segment, ``[nbytes]`` uint8; unmapped when no tensor of it is left.

    Raises:
        OSError: if there is no room for it in this process.
    """
    nbytes = os.fstat(file.fd).st_size
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # no page faults later
    memory = mmap.mmap(file.fd, nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with torch.inference_mode(False):  # else only inference could write to it
        return torch.frombuffer(memory, dtype=torch.uint8)


def _require_memory(nbytes: int, spare: float) -> None:
    """Raise where the kernel would rather kill a process than find that many bytes.

    Half of the available memory stays free for other processes.
    """
    available = _memory("MemAvailable")
    if nbytes > available // 2 or available - nbytes < spare * _memory("MemTotal"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _memory(field: str) -> int:
    """Return the bytes that the kernel reports for a field, or a huge number without a report."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return sys.maxsize


@dataclass(frozen=True, slots=True)
class _Region:
    number: int
    start: int
    end: int


class Ring:
    """The regions of successive collectives in ``capacity`` bytes: one after the other.

    The sizes of earlier collectives determine the region of a collective. Therefore ranks that
    issue equal collectives agree without communication.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._head = 0
        self._regions: deque[_Region] = deque()

    def __len__(self) -> int:
        """How many regions are taken."""
        return len(self._regions)

    @property
    def oldest(self) -> int | None:
        """The number of the collective whose region was taken first; None if none is."""
        return self._regions[0].number if self._regions else None

    def _start(self, nbytes: int) -> int:
        return self._head if self._head + nbytes <= self.capacity else 0

    def has_room(self, nbytes: int) -> bool:
        """Whether the next region of ``nbytes``, at most the capacity, would overlap no other."""
        start = self._start(nbytes)
        end = start + nbytes
        return not any(each.start < end and start < each.end for each in self._regions)

    def take(self, number: int, nbytes: int) -> int:
        """Where the region of collective ``number`` starts; there is room for it."""
        start = self._start(nbytes)
        self._head = start + nbytes
        self._regions.append(_Region(number, start, start + nbytes))
        return start

    def release_oldest(self) -> None:
        """Free the oldest region."""
        self._regions.popleft()

"""Shards in a file: memory that is mapped from it, read ahead of use, and dropped after use.

``ShardFile`` is the main class. ``FileOffloadPolicy`` decides which shards, and reports each use.

[Note: mapped shards] A shard is a tensor over a shared mapping of a part of the file. Code uses the
parameter as always: the system reads a page when it is touched, and writes changed pages back. This
module decides which pages are in memory, not what is right: a page that was dropped too early is
read again. Only errors of the disk need care. A page that cannot be read ends the process (SIGBUS)
where it is touched. Therefore ``require`` has the kernel read the pages of a shard
(``MADV_POPULATE_READ``), which reports an error instead.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import weakref
from collections import OrderedDict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import islice
from time import perf_counter

import torch

from fullshard.policies.file_space import Extent, FileSpace

__all__ = ["ShardFile"]

_POPULATE_READ = 22  # of Linux 5.14; not in every version of Python's mmap
_SYNC = 4  # MS_SYNC of msync
_PIECE = 1 << 20  # bytes of a read on an older kernel


class StoredShard:
    """A shard in the file.

    Attributes:
        extent: its place.
        address: the first byte of its memory.
        moving: held by the thread that reads or drops its pages.
        reading: the read that was begun last.
    """

    def __init__(self, extent: Extent, address: int, mapped: mmap.mmap) -> None:
        """Keep the mapping alive only while it is read or dropped: its tensors own it."""
        self.extent = extent
        self.address = address
        self.mapped = weakref.ref(mapped)
        self.moving = threading.Lock()
        self.reading: Future[None] | None = None


class ShardFile:
    """The shards of this process in one file, of which few are in memory.

    Attributes:
        space: the file.
        resident_bytes: bytes of shards that were used last, and stay in memory.
        reads_late: uses that had to wait for their shard.
        reads_ahead: shards that were read ahead of their use.
        wait_seconds: seconds that uses waited for the disk.
    """

    def __init__(self, space: FileSpace, *, resident_bytes: int, ahead_bytes: int) -> None:
        """Start without shards.

        Args:
            space: the file, not opened for direct I/O.
            resident_bytes: how many bytes of shards stay in memory after use, and are read ahead.
            ahead_bytes: how many bytes to read ahead.
        """
        self.space = space
        self.reads_late = self.reads_ahead = 0
        self.wait_seconds = 0.0
        self._limit, self._ahead_bytes = resident_bytes, ahead_bytes
        self._lock = threading.RLock()
        self._shards: dict[int, StoredShard] = {}  # by address
        self._resident: OrderedDict[StoredShard, None] = OrderedDict()  # the oldest use first
        self.resident_bytes = 0
        self._order: list[StoredShard] = []  # uses since the last ``end_pass``
        self._last_order: list[StoredShard] = []  # uses before that
        self._place = 0  # in the last order, of the next use
        self._dropping: deque[tuple[Future[None], int]] = deque()
        self._error = ""
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="fullshard-shards-in")
        self._dropper = ThreadPoolExecutor(1, thread_name_prefix="fullshard-shards-out")

    def take_error(self) -> str:
        """Return the first error of a thread, and forget it."""
        with self._lock:
            error, self._error = self._error, ""
        return error

    def note(self, error: str) -> None:
        """Keep an error, unless there is one."""
        with self._lock:
            self._error = self._error or error

    def find(self, tensor: torch.Tensor) -> StoredShard | None:
        """Return the place of ``tensor``; None if its memory is not of this file."""
        return self._shards.get(tensor.data_ptr()) if tensor.numel() else None

    def store(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``tensor``, contiguous on the host, whose memory is in the file.

        A copy through the mapping would first read the old bytes of each page from the disk.

        Raises:
            OSError: if the disk has no space for it.
        """
        extent = self.space.reserve(tensor.nbytes)
        try:
            _write(self.space.fd, tensor, extent.offset)
            mapped = mmap.mmap(self.space.fd, extent.nbytes, offset=extent.offset)
        except BaseException:
            self.space.give_back(extent)
            raise
        with torch.inference_mode(False):
            memory = torch.frombuffer(mapped, dtype=torch.uint8)[: tensor.nbytes]
            stored = memory.view(tensor.dtype).view(tensor.shape)
        shard = StoredShard(extent, stored.data_ptr(), mapped)
        with self._lock:
            self._shards[shard.address] = shard
        weakref.finalize(mapped, self._forget, shard).atexit = False
        self._keep(shard)
        return stored

    def _forget(self, shard: StoredShard) -> None:
        """Free the space of a shard that no tensor uses any more."""
        with self._lock:
            if self._shards.get(shard.address) is shard:
                del self._shards[shard.address]
            self._leave(shard)
        self.space.give_back(shard.extent)

    # -- uses -------------------------------------------------------------------------------------

    def require(self, shard: StoredShard, *, in_order: bool) -> None:
        """Return when the pages of ``shard`` are in memory, and begin to read what follows.

        Args:
            shard: the shard.
            in_order: whether the use is one of a pass that repeats.

        Raises:
            OSError: if they cannot be read.
        """
        reading = shard.reading if self._keep(shard) else self._read(shard)
        ahead = self._expected_after(shard) if in_order else ()
        if reading is not None:
            self.reads_late += not reading.done()
            start = perf_counter()
            try:
                reading.result()
            except OSError:
                self._leave(shard)  # so that the next use reads again
                raise
            self.wait_seconds += perf_counter() - start
        for each in ahead:
            if not self._keep(each):
                self.reads_ahead += 1
                self._read(each)

    def end_pass(self) -> None:
        """End a pass over shards; the next one is expected to use them in equal order."""
        if self._order:
            self._last_order, self._order = self._order, []
            self._place = 0

    def _expected_after(self, shard: StoredShard) -> list[StoredShard]:
        """Note a use, and return what the last pass used after it, as far as is read ahead."""
        if len(self._order) >= 4 * len(self._shards) + 16:  # no backward ends the pass
            self.end_pass()
        self._order.append(shard)
        last = self._last_order
        for start in (self._place, 0):
            if shard in islice(last, start, None):
                place = last.index(shard, start) + 1
                break
        else:
            return []
        self._place = place
        ahead, nbytes = list[StoredShard](), 0
        for each in islice(last, place, None):
            nbytes += each.extent.nbytes
            if nbytes > self._ahead_bytes:
                break
            if each.mapped() is not None:
                ahead.append(each)
        return ahead

    def _keep(self, shard: StoredShard) -> bool:
        """Make ``shard`` the last to be dropped, drop others, and return whether it was kept."""
        with self._lock:
            kept, dropped = self._leave(shard), list[StoredShard]()
            self._resident[shard] = None
            self.resident_bytes += shard.extent.nbytes
            while self.resident_bytes > self._limit and len(self._resident) > 1:
                dropped.append(next(iter(self._resident)))
                self._leave(dropped[-1])
            for each in dropped:
                self._dropping.append((self._dropper.submit(self._drop, each), each.extent.nbytes))
        while (oldest := self._oldest_drop()) is not None:
            oldest.result()
        return kept

    def _oldest_drop(self) -> Future[None] | None:
        """Take the oldest drop that is over, or that has to be waited for; None: there is none."""
        with self._lock:
            waiting = sum(size for _, size in self._dropping)
            if self._dropping and (self._dropping[0][0].done() or waiting > self._limit):
                return self._dropping.popleft()[0]
        return None

    def _leave(self, shard: StoredShard) -> bool:
        """Count ``shard`` no more, and return whether it was counted."""
        with self._lock:
            if shard not in self._resident:
                return False
            del self._resident[shard]
            self.resident_bytes -= shard.extent.nbytes
            return True

    # -- on threads -------------------------------------------------------------------------------

    def _read(self, shard: StoredShard) -> Future[None]:
        shard.reading = self._reader.submit(self._populate, shard)
        return shard.reading

    def _populate(self, shard: StoredShard) -> None:
        with shard.moving:
            mapped, extent = shard.mapped(), shard.extent
            if mapped is None:
                return
            os.posix_fadvise(self.space.fd, extent.offset, extent.nbytes, os.POSIX_FADV_WILLNEED)
            try:
                _madvise(shard.address, extent.nbytes, _POPULATE_READ)
            except OSError as error:
                if error.errno != errno.EINVAL:  # of an older kernel
                    raise
                for start in range(0, extent.nbytes, _PIECE):
                    size = min(_PIECE, extent.nbytes - start)
                    os.pread(self.space.fd, size, extent.offset + start)

    def _drop(self, shard: StoredShard) -> None:
        """Write changed pages of ``shard`` to the disk, and free the memory of all its pages."""
        with shard.moving:
            mapped, extent = shard.mapped(), shard.extent
            if mapped is None or shard in self._resident:
                return
            try:
                _checked(_libc().msync(shard.address, extent.nbytes, _SYNC))
                _madvise(shard.address, extent.nbytes, mmap.MADV_DONTNEED)
                os.posix_fadvise(
                    self.space.fd, extent.offset, extent.nbytes, os.POSIX_FADV_DONTNEED
                )
            except OSError as error:
                what = f"{extent.nbytes} bytes of a shard could not be written"
                self.note(f"{what}: {error.strerror}; load the last checkpoint")


def _write(fd: int, tensor: torch.Tensor, offset: int) -> None:
    """Write the bytes of ``tensor``, contiguous on the host, at ``offset`` of a file."""
    left = memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
    while left:
        written = os.pwrite(fd, left, offset)
        left, offset = left[written:], offset + written


def _madvise(address: int, nbytes: int, advice: int) -> None:
    """Advise the kernel on pages, without Python's lock, which ``mmap.madvise`` keeps."""
    _checked(_libc().madvise(address, nbytes, advice))


def _checked(failed: int) -> None:
    """Raise the error of a call of the C library that ``failed``."""
    if failed:
        number = ctypes.get_errno()
        if number == errno.EFAULT:  # of MADV_POPULATE_READ: where a touch would be a SIGBUS
            number = errno.EIO
        raise OSError(number, os.strerror(number))


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = libc.msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc

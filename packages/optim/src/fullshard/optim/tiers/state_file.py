"""One file of this rank that holds optimizer state: space, reads and writes in the background.

``StateFile`` is the main class; the file has no name (``FileSpace`` of ``fullshard.policies``).
ZeRO-Infinity (S. Rajbhandari et al., arXiv 2104.07857) introduced state on NVMe. ``staging`` moves
tensors through this file; ``offloaded`` decides which tensors, and when.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from fullshard.policies.spi import ALIGNMENT, Extent, FileSpace, aligned

__all__ = ["ALIGNMENT", "Extent", "StateFile", "aligned", "joined"]

_PIECE = 8 << 20  # bytes that one thread moves in one call


class StateFile:
    """A file without a name, and the threads that read and write it.

    Attributes:
        folder: the folder of the file.
        space: the file, and its parts that are in use.
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
        capacity = aligned(max(capacity, 1))
        folder.mkdir(parents=True, exist_ok=True)
        space = FileSpace(folder, prefix="fullshard-state-", direct=direct, capacity=capacity)
        self.space = space
        self._fd, self.direct = space.fd, space.direct
        try:
            os.ftruncate(self._fd, capacity)
            self._mapped = mmap.mmap(self._fd, capacity)
        except BaseException:
            space.close()
            raise
        self.memory = torch.frombuffer(self._mapped, dtype=torch.uint8)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fullshard-state")
        self.bytes_read = self.bytes_written = 0
        self.close = weakref.finalize(self, _close, space, self._pool)

    def reserve(self, nbytes: int) -> Extent:
        """Return an extent of at least ``nbytes``, for which the disk has space from now on.

        Raises:
            OSError: if the disk has none.
        """
        return self.space.reserve(nbytes)

    def give_back(self, extent: Extent) -> None:
        """Let another tensor of the same size have ``extent``."""
        self.space.give_back(extent)

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
        place, moved = 0, []
        for offset, nbytes in joined(extents):
            for start in range(0, nbytes, _PIECE):
                piece = memory[place + start : place + min(start + _PIECE, nbytes)]
                moved.append(self._pool.submit(_move_piece, call, self._fd, offset + start, piece))
            place += nbytes
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


def _move_piece(call: Callable[..., int], fd: int, offset: int, piece: torch.Tensor) -> None:
    """Read or write ``piece``; a call may move fewer bytes than asked.

    The thread holds the tensor: after an error, the caller may drop the buffer during a transfer.
    """
    nbytes = piece.numel()
    memory = memoryview((ctypes.c_char * nbytes).from_address(piece.data_ptr())).cast("B")
    done = 0
    while done < nbytes:
        moved = call(fd, [memory[done:]], offset + done)
        if moved <= 0:
            raise OSError(errno.EIO, f"the file ends at byte {offset + done}")
        done += moved


def _close(space: FileSpace, pool: ThreadPoolExecutor) -> None:
    pool.shutdown()
    space.close()

"""A range of addresses of this process, and which pages it shows.

Owns: windows and the two system calls behind them. A window keeps its address as long as any tensor
over it lives, so that aliases which an autograd graph saved stay right, while the pages that it
shows may be those of a file that other windows show too, or private ones. Refuses: knowing whose
turn it is to fill the pages.

Python's ``mmap`` cannot map over an address that is in use, so the C library is called. It is there
wherever ``process_watch.host_identity`` says that processes can share memory, which is on Linux.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os

import torch

__all__ = ["Window", "whole_pages"]

_MAP_FIXED = 0x10  # of Linux, as the next two; Python's mmap does not name them
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_FAILED = ctypes.c_void_p(-1).value
_RIGHTS = mmap.PROT_READ | mmap.PROT_WRITE


def whole_pages(nbytes: int) -> int:
    """``nbytes`` rounded up to pages, at least one."""
    return max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE


class Window(mmap.mmap):
    """A range of addresses over the first pages of a file, and of nothing else.

    Attributes:
        address: where it begins.
        nbytes: how long it is, in whole pages.
        moved_out: whether it shows private pages instead.
        keeps: what must not die before any tensor over it.
    """

    address: int
    nbytes: int
    moved_out: bool
    keeps: object

    def __new__(cls, fd: int, nbytes: int, keeps: object) -> Window:
        """Shows the first ``nbytes``, whole pages, of the file open as ``fd``.

        Raises:
            OSError: if there is no room for it in this process.
        """
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        window = super().__new__(cls, -1, nbytes, flags=flags, prot=_RIGHTS)
        window.nbytes = nbytes
        window.keeps = keeps
        window.address = window.memory().data_ptr()
        window.show(fd)
        return window

    def memory(self) -> torch.Tensor:
        """All bytes, ``[nbytes]`` uint8; the window lives as long as any tensor of it does."""
        with torch.inference_mode(False):  # else only inference could write to it
            return torch.frombuffer(self, dtype=torch.uint8)

    def show(self, fd: int) -> None:
        """Shows the pages of the file again, every one of them at once: no page faults later.

        Raises:
            OSError: if there is no room for it in this process.
        """
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE | _MAP_FIXED
        _checked(_libc().mmap(self.address, self.nbytes, _RIGHTS, flags, fd, 0))
        self.moved_out = False

    def move_out(self) -> None:
        """Shows private pages, with what it showed before: nobody can tell, but by time.

        Raises:
            OSError: if there is not enough memory.
        """
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        copy = _checked(_libc().mmap(None, self.nbytes, _RIGHTS, flags, -1, 0))
        ctypes.memmove(copy, self.address, self.nbytes)
        how = _MREMAP_MAYMOVE | _MREMAP_FIXED
        _checked(_libc().mremap(copy, self.nbytes, self.nbytes, how, ctypes.c_void_p(self.address)))
        self.moved_out = True


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    size, number = ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes = [ctypes.c_void_p, size, number, number, number, ctypes.c_long]
    libc.mremap.argtypes = [ctypes.c_void_p, size, size, number, ctypes.c_void_p]
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    return libc


def _checked(address: int | None) -> int:
    """``address``, unless it says that the call failed."""
    if address is None or address == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return address

"""A range of addresses of this process, and which pages it shows.

Owns: windows and the two system calls behind them. A window keeps its address as long as any tensor
over it lives, so aliases in an autograd graph stay valid. The window may show pages of a file that
other windows show too, private pages, or poison. Refuses: knowing whose turn it is to fill the
pages.

Python's ``mmap`` cannot map over an address that is in use, so the C library is called. The C
library exists wherever ``process_watch.host_identity`` allows processes to share memory, which is
on Linux.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from enum import Enum

import torch

__all__ = ["Shown", "Window", "give_back_pages", "whole_pages"]

_MAP_FIXED = 0x10  # of Linux, as the next two; Python's mmap does not name them
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate
_FAILED = ctypes.c_void_p(-1).value
_POISON = 0xFF  # each byte: reads as NaN in all floating-point dtypes
_POISON_NBYTES = 16 << 20  # mapped again and again: a process has room for some 60000 mappings
_RIGHTS = mmap.PROT_READ | mmap.PROT_WRITE


def whole_pages(nbytes: int) -> int:
    """``nbytes`` rounded up to pages, at least one."""
    return max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE


def give_back_pages(fd: int) -> None:
    """Give all pages of the file open as ``fd`` back to the system: it holds zeros then.

    Mappings of it get new pages where they are read or written. The file keeps them on a system
    that cannot do it.
    """
    how = _KEEP_SIZE | _PUNCH_HOLE
    _libc().fallocate(fd, how, 0, os.fstat(fd).st_size)


class Shown(Enum):
    """Which pages a window shows."""

    FILE = "those of the file"
    PRIVATE = "pages of this process alone, with what the file held when it moved out"
    POISON = "NaN: nobody may read here"


class Window(mmap.mmap):
    """A range of addresses over only the first pages of a file.

    Attributes:
        address: where it begins.
        nbytes: how long it is, in whole pages.
        shown: which pages it shows.
        keeps: what must not die before any tensor over it.
    """

    address: int
    nbytes: int
    shown: Shown
    keeps: object

    def __new__(cls, fd: int, nbytes: int, keeps: object) -> Window:
        """Show the first ``nbytes``, whole pages, of the file open as ``fd``.

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
        """Return all bytes, ``[nbytes]`` uint8; the window lives as long as any tensor over it."""
        with torch.inference_mode(False):  # else only inference could write to it
            return torch.frombuffer(self, dtype=torch.uint8)

    def show(self, fd: int) -> None:
        """Map all pages of the file again at once: no page faults later.

        Raises:
            OSError: if there is no room for it in this process.
        """
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE | _MAP_FIXED
        _checked(_libc().mmap(self.address, self.nbytes, _RIGHTS, flags, fd, 0))
        self.shown = Shown.FILE

    def move_out(self) -> None:
        """Show private pages with the contents of the pages before: only timing differs.

        Raises:
            OSError: if there is not enough memory.
        """
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        copy = _checked(_libc().mmap(None, self.nbytes, _RIGHTS, flags, -1, 0))
        ctypes.memmove(copy, self.address, self.nbytes)
        how = _MREMAP_MAYMOVE | _MREMAP_FIXED
        _checked(_libc().mremap(copy, self.nbytes, self.nbytes, how, ctypes.c_void_p(self.address)))
        self.shown = Shown.PRIVATE

    def poison(self) -> None:
        """Show poison: reads through an old alias return NaN, and writes are lost.

        Raises:
            OSError: if this process has no room for more mappings.
        """
        flags = mmap.MAP_PRIVATE | _MAP_FIXED
        for start in range(0, self.nbytes, _POISON_NBYTES):
            nbytes = min(_POISON_NBYTES, self.nbytes - start)
            _checked(_libc().mmap(self.address + start, nbytes, _RIGHTS, flags, _poison_file(), 0))
        self.shown = Shown.POISON


@functools.cache
def _poison_file() -> int:
    fd = os.memfd_create("fullshard-poison", os.MFD_CLOEXEC)
    os.write(fd, bytes([_POISON]) * _POISON_NBYTES)
    return fd


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    size, number = ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes = [ctypes.c_void_p, size, number, number, number, ctypes.c_long]
    libc.mremap.argtypes = [ctypes.c_void_p, size, size, number, ctypes.c_void_p]
    libc.fallocate.argtypes = [number, number, ctypes.c_long, ctypes.c_long]
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    return libc


def _checked(address: int | None) -> int:
    """Return ``address``, or raise if the call failed."""
    if address is None or address == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return address

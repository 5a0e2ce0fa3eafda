"""The files of a set that one rank writes, by file descriptor.

``OpenFiles`` names the file, and the bytes that it takes, in each error of the system.
``SaveFolder`` owns the names, ``weights.save`` the contents.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from fullshard.checkpoint.files.folder import SaveFolder
from fullshard.checkpoint.files.write_errors import write_error

__all__ = ["OpenFiles"]


class OpenFiles:
    """Files that are being written.

    Attributes:
        written: bytes that this rank has written.
    """

    def __init__(self, folder: SaveFolder, sizes: Sequence[int]) -> None:
        """Open none yet; ``sizes`` has the bytes of each whole file."""
        self._folder = folder
        self._sizes = sizes
        self._open: dict[int, int] = {}
        self.written = 0

    def create(self, number: int) -> None:
        """Make file ``number``; no other rank makes it."""
        self._begin(number, os.O_CREAT | os.O_EXCL)

    def put(self, number: int, content: memoryview, offset: int) -> None:
        """Write ``content`` into file ``number``, which this rank or another one has made."""
        if number not in self._open:
            self._begin(number, 0)
        with self._naming(number):
            while content:
                done = os.pwrite(self._open[number], content, offset)
                if done == 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                content, offset = content[done:], offset + done
                self.written += done

    def finish(self) -> None:
        """Bring all that was written to the disk, and close the files."""
        for number, descriptor in self._open.items():
            with self._naming(number):
                os.fsync(descriptor)
        while self._open:
            number, descriptor = self._open.popitem()
            with self._naming(number):
                os.close(descriptor)

    def abandon(self) -> None:
        """Close the files, whatever the system says."""
        while self._open:
            with suppress(OSError):
                os.close(self._open.popitem()[1])

    def _begin(self, number: int, flags: int) -> None:
        with self._naming(number):
            flags |= os.O_WRONLY | os.O_CLOEXEC
            self._open[number] = os.open(self._folder.written(number), flags, 0o666)

    @contextmanager
    def _naming(self, number: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            path = self._folder.written(number)
            raise write_error(error, path, self._sizes[number]) from error

"""Shares the physical pages of a few groups' full parameters among all groups of a process group.

Owns: frames, which one a new shared buffer gets, and the setting how many there are. Each buffer
has addresses of its own (see ``shared_pages``), and shows the pages of one frame there for good;
several buffers may have the same frame. Refuses: knowing when ranks may write (``shared_group``).

[Note: frames] A buffer gets its frame at its group's first gather, from the first rank: the one
whose last use is longest ago, of those that no group lies in just then. Only if fewer than
``set_shared_frames`` says are free is there a new one. So what is unsharded at once (a root, the
module around a module, all that a user has unsharded) gets frames of its own, and all else shares a
few. It costs nothing from then on: no page is mapped, zeroed or faulted for a gather.

In a later step two groups with one frame may be wanted at once all the same. Then whoever comes to
gather the second moves the first out: the same addresses show private pages with the same contents,
until it is resharded. That is each rank's own affair, and told to nobody. So is a group moved out
that must stay at its addresses, where a graph holds aliases, while another transport gathers it.
Statistics count both.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass

from fullshard.comm.same_host.shared_pages import Window
from fullshard.comm.same_host.shared_segment import SegmentFile

__all__ = ["Frame", "Frames", "set_shared_frames"]

_FRAMES = 2  # for a group and one gathered ahead
_SPARE = 0.25  # of the host's memory that frames, which stay, must leave

_most_free: int | None = _FRAMES


def set_shared_frames(count: int | None = _FRAMES) -> None:
    """Says for how many groups ranks of one host keep memory, beside what is unsharded at once.

    Fewer is less memory. More lets a rank be further ahead of the others, which saves time where
    ranks have unequal work or share processors. With None the full parameters of every group stay,
    once per host. It holds for groups that are gathered for the first time after it. Call it on
    all ranks alike.

    Args:
        count: at least 1; None: memory of each group's own.

    Raises:
        ValueError: if ``count`` is less.
        TypeError: if ``count`` is no number.
    """
    global _most_free
    if count is not None:
        if not isinstance(count, int) or isinstance(count, bool):
            kind = type(count).__name__
            raise TypeError(f"count is {count!r}, a {kind}; pass a number of groups, or None")
        if count < 1:
            raise ValueError(f"count is {count}; at least 1 group must have memory, or pass None")
    _most_free = count


@dataclass
class _Turns:
    """Gathers in a frame: launched by this rank, and of these, left by it."""

    taken: int = 0
    left: int = 0


class Frame:
    """Pages that the windows of several buffers show.

    Attributes:
        file: which pages.
        turns: gathers there. Known for as long as the process group lives: where the buffers of a
            frame died on this rank only, the others may offer it again.
        launched: number of the last of them, among all collectives.
    """

    def __init__(self, file: SegmentFile, turns: _Turns) -> None:
        self.file = file
        self.turns = turns
        self.launched = -1
        self._window: weakref.ref[Window] | None = None
        weakref.finalize(self, file.close)

    @property
    def window(self) -> Window | None:
        """Where the last of the gathers is; None once nobody has it any more."""
        return None if self._window is None else self._window()

    @property
    def in_use(self) -> bool:
        """Whether this rank reads what the last gather left."""
        return self.turns.left < self.turns.taken and self.window is not None

    @property
    def nbytes(self) -> int:
        """How large it is now."""
        return os.fstat(self.file.fd).st_size

    def take(self, window: Window, number: int) -> None:
        """Takes note of a gather."""
        self.turns.taken += 1
        self.launched = number
        self._window = weakref.ref(window)


class Frames:
    """The frames of one process group, as this rank knows them.

    Attributes:
        windows: those of all buffers.
        moved_out: how often one was moved out of its frame.
        refused: how often there was no memory for a buffer.
    """

    def __init__(self) -> None:
        self.windows: weakref.WeakSet[Window] = weakref.WeakSet()
        self.moved_out = 0
        self.refused = 0
        self._alive: weakref.WeakValueDictionary[int, Frame] = weakref.WeakValueDictionary()
        self._turns: dict[int, _Turns] = {}

    @property
    def sizes(self) -> list[int]:
        """Bytes of each that this rank maps."""
        return [frame.nbytes for frame in self._alive.values()]

    def offer(self, nbytes: int) -> SegmentFile:
        """The file for a new buffer of ``nbytes``, as the first rank chooses it.

        Raises:
            OSError: if there is not enough memory.
        """
        free = [frame for frame in self._alive.values() if not frame.in_use]
        if _most_free is None or len(free) < _most_free:
            return SegmentFile.make(nbytes, _SPARE, grows=True)
        chosen = min(free, key=lambda frame: frame.launched)
        chosen.file.grow(nbytes, _SPARE)
        return chosen.file.again()

    def opened(self, file: SegmentFile, nbytes: int) -> tuple[Window, Frame]:
        """A new buffer's window of ``nbytes``, and its frame: that with the file that was offered.

        Raises:
            OSError: if there is no room for it in this process.
        """
        frame = self._alive.get(file.inode)
        if frame is None:
            turns = self._turns.setdefault(file.inode, _Turns())
            frame = self._alive[file.inode] = Frame(file.again(), turns)
        window = Window(file.fd, nbytes, keeps=frame)
        self.windows.add(window)
        return window, frame

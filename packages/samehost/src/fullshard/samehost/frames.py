"""Shares the physical pages of a few groups' full parameters among all groups of a process group.

Owns: frames, which one a new shared buffer gets, and the setting how many there are. A buffer has
its own addresses (see ``shared_pages``) and always shows the pages of one frame there; several
buffers may have the same frame. Refuses: knowing when ranks may write (``shared_group``).

[Note: frames] A buffer gets its frame at its group's first gather, from the first rank: the least
recently used frame that no group uses at that moment. A new frame is made only if fewer frames are
free than ``set_shared_frames`` asks for. Therefore groups that are unsharded at once (a root, the
module around a module, all that a user has unsharded) get their own frames. Remaining groups share
a few frames. Later gathers have no cost for memory: no page is mapped, zeroed or faulted for a
gather.

Nevertheless a later step may need two groups of one frame at once. Then a rank that gathers the
second group moves the first group out: its addresses show private pages with equal contents until
the group is resharded. A rank does so by itself and sends no message about it. A rank also moves a
group out if another transport gathers it while a graph holds aliases, because the addresses must
stay valid. Statistics count both.

If a frame is large (``set_shared_frames`` sets the limit), the pages of all frames go back to the
system between steps, and the next gather gets new pages. A rank holds a frame from its first gather
there in a step to the end of the step, by a lock that the system keeps. The rank that is the last
to end the step gives the pages back.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass

from fullshard.samehost.pages import Window
from fullshard.samehost.segment import SegmentFile

__all__ = ["FRAMES", "Frame", "Frames", "release_frames", "set_shared_frames"]

_FRAMES = 2  # for a group and one gathered ahead
_KEPT = 32 << 20  # bytes: malloc, too, gives larger blocks back to the system at once
_SPARE = 0.25  # of the host's memory that frames must leave when they are made

_most_free: int | None = _FRAMES
_kept: int | None = _KEPT


def set_shared_frames(count: int | None = _FRAMES, *, kept: int | None = _KEPT) -> None:
    """Say how much memory the ranks of one host use for full parameters.

    Fewer frames are less memory. More let a rank be further ahead of the others, which saves time
    where ranks have unequal work or share processors. Call it on all ranks alike.

    Args:
        count: frames in addition to the groups that are unsharded at once, at least 1. None: a
            frame for each group. The setting holds for groups whose first gather comes after it.
        kept: bytes. If a frame is larger, all frames are given back to the system between steps,
            which costs time in the next step. 0: they always are; None: they never are.

    Raises:
        ValueError: if ``count`` or ``kept`` is less.
        TypeError: if ``count`` or ``kept`` is not a number.
    """
    global _most_free, _kept
    for name, value in (("count", count), ("kept", kept)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            kind = type(value).__name__
            raise TypeError(f"{name} is {value!r}, a {kind}; pass a number, or None")
    if count is not None and count < 1:
        raise ValueError(f"count is {count}; at least 1 group must have memory, or pass None")
    if kept is not None and kept < 0:
        raise ValueError(f"kept is {kept}; pass a number of bytes from 0 on, or None")
    _most_free, _kept = count, kept


@dataclass
class _Turns:
    """Gathers in a frame: launched by this rank, and of these, left by it."""

    taken: int = 0
    left: int = 0


class Frame:
    """Pages that the windows of several buffers show.

    Attributes:
        file: which pages.
        turns: gathers there. Known for as long as the process group lives: if the buffers of a
            frame died on this rank only, other ranks may choose the frame again.
        launched: number of the last of them, among all collectives.
    """

    def __init__(self, file: SegmentFile, turns: _Turns) -> None:
        self.file = file
        self.turns = turns
        self.launched = -1
        self._held = False
        self._window: weakref.ref[Window] | None = None
        weakref.finalize(self, file.close)

    @property
    def window(self) -> Window | None:
        """The window of the last gather; None after it was freed."""
        return None if self._window is None else self._window()

    @property
    def in_use(self) -> bool:
        """Whether this rank reads what the last gather left."""
        return self.turns.left < self.turns.taken and self.window is not None

    def hold(self) -> None:
        """Keep its pages, whatever other ranks give back: a gather is to write there."""
        if not self._held:
            self._held = True
            self.file.hold()

    def release(self, *, free_pages: bool) -> None:
        """Stop keeping its pages. ``free_pages``: the last rank gives them to the system."""
        if self._held and not self.in_use:
            self._held = False
            self.file.release(free_pages=free_pages)

    def take(self, window: Window, number: int) -> None:
        """Take note of a gather."""
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

    def __init__(self, lock: threading.RLock) -> None:
        """Start with no frame. ``lock`` is held by each thread that launches a gather."""
        self.windows: weakref.WeakSet[Window] = weakref.WeakSet()
        self.moved_out = 0
        self.refused = 0
        self._alive: weakref.WeakValueDictionary[int, Frame] = weakref.WeakValueDictionary()
        self._turns: dict[int, _Turns] = {}
        self._lock = lock
        FRAMES.add(self)

    @property
    def sizes(self) -> list[int]:
        """Bytes of memory of each that this rank maps."""
        return [frame.file.nbytes for frame in self._alive.values()]

    def release(self) -> None:
        """Free the frames that no rank uses, if one frame is large; see [Note: frames]."""
        with self._lock:
            large = _kept is not None and any(nbytes > _kept for nbytes in self.sizes)
            for frame in self._alive.values():
                frame.release(free_pages=large)

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


FRAMES: weakref.WeakSet[Frames] = weakref.WeakSet()
"""The frames of each process group whose ranks share memory; empty where none does."""


def release_frames() -> None:
    """Give frames back that no rank uses, where some are large: a step has ended.

    It communicates nothing.
    """
    for frames in list(FRAMES):
        frames.release()

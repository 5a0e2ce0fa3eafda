"""The ranks of a process group that meet in shared memory.

Owns: the segment that they map, and the life of a collective in it. A collective has a region of
the segment. At its launch each rank writes its part there and says so; at its end each rank reads
what the others wrote. Refuses: knowing what is written and read: callers hand in both.

[Note: ahead and behind] Between launch and end no rank needs another to do anything: a rank that
computes does not keep the others waiting. A region is written again once every rank has left the
collective before, which each says with its next message. So a rank can be ahead of the others by as
many collectives as the segment holds, two of the largest. A rank that would be further ahead first
ends those of its own that lie in the way, then waits for the others to do so: they will, at
the latest when they come to the same collective.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from fullshard.comm.debug.rollcall import CollectiveMismatchError
from fullshard.comm.runtime.grad_mode import without_grad
from fullshard.comm.same_host.shared_frames import Frame, Frames
from fullshard.comm.same_host.shared_mapping import map_together
from fullshard.comm.same_host.shared_meeting import Meeting, mismatch, slot_meeting
from fullshard.comm.same_host.shared_pages import Window, whole_pages
from fullshard.comm.same_host.shared_segment import Ring, SegmentFile, aligned, map_segment
from fullshard.comm.same_host.shared_signals import (
    MOST_AHEAD,
    MessageKind,
    NoRoomError,
    SharedMemoryError,
)
from fullshard.comm.same_host.shared_talk import Talk

__all__ = ["SharedGroup", "SharedSlot", "SharedWork", "known_group", "shared_group"]

_HELD = 2  # collectives as large as the largest, for which there is room

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, SharedGroup | str] = (
    weakref.WeakKeyDictionary()
)


def shared_group(process_group: dist.ProcessGroup) -> SharedGroup:
    """The shared memory of a process group; made at the first call, which is a collective.

    Raises:
        SharedMemoryError: on all ranks, if they are not processes of one host.
    """
    group = _groups.get(process_group)
    if group is None:
        try:
            group = SharedGroup(process_group)
        except SharedMemoryError as error:
            group = str(error)
        _groups[process_group] = group
    if isinstance(group, str):
        raise SharedMemoryError(group)
    return group


def known_group(process_group: dist.ProcessGroup) -> SharedGroup | None:
    """The shared memory of a process group, if there is some."""
    group = _groups.get(process_group)
    return group if isinstance(group, SharedGroup) else None


@dataclass(eq=False)
class _Pending:
    """A collective that was launched; ``open`` is None once it has ended, with its inputs."""

    number: int
    open: tuple[Meeting, torch.Tensor] | None


class SharedWork(dist.Work):
    """The handle of a collective in shared memory; ``wait()`` ends it."""

    def __init__(self, group: SharedGroup, pending: _Pending) -> None:
        super().__init__()
        self._group = group
        self._pending = pending

    def is_completed(self) -> bool:
        """Whether ``wait()`` would not wait for another rank."""
        return self._group.is_ready(self._pending)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Read the result, once every rank has written its part; later calls do nothing.

        Args:
            timeout: how long to wait for a rank; 0: as long as the process group says.

        Raises:
            PeerLostError: if a rank has ended, or does not come in time.
            CollectiveMismatchError: if a rank came to another collective.
        """
        self._group.finish(self._pending, timeout.total_seconds() or None)
        return True


class SharedSlot:
    """Memory that all ranks map, in which gathers leave full tensors for them to use in place.

    Attributes:
        window: where this process has them.
        frame: the pages that it shows, which other slots may show too; see [Note: frames].
        memory: what they map, ``[n]`` uint8.
    """

    def __init__(self, group: SharedGroup, window: Window, frame: Frame) -> None:
        self.window = window
        self.frame = frame
        self.memory = window.memory()
        self._used = False
        self._group = group

    def gather(self, write: Callable[[], None]) -> SharedWork:
        """A gather in flight, once no rank reads the result of the one before.

        ``write`` has put this rank's part in its place. The others' parts are there once the handle
        was waited for; after that, and before the next gather, say ``leave()``.

        Raises:
            PeerLostError: if a rank has ended, or does not leave in time.
        """
        self._used = True
        return self._group.launch_in(self, slot_meeting(self.memory.numel(), write))

    def show(self) -> None:
        """Shows the pages of the frame, if the window was moved out of it."""
        if self.window.moved_out:
            self.window.show(self.frame.file.fd)

    def move_out(self) -> None:
        """Shows private pages, until ``leave()``; see [Note: frames]."""
        self._group.move_out(self)

    def leave(self) -> None:
        """Says, once, that this rank reads what is there no more: others may write over it."""
        if self._used:
            self._used = False
            self._group.leave_slot(self)
        else:
            self.show()


class SharedGroup:
    """The segments of one process group, and the collectives in flight in them.

    Attributes:
        rank: this rank's in the process group.
        world_size: how many ranks there are.
        launched: collectives launched so far.
        frames: where slots lie.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        """Finds the other ranks: a collective call.

        Raises:
            SharedMemoryError: on all ranks, if they are not processes of one host.
        """
        self.rank = process_group.rank()
        self.world_size = process_group.size()
        self.launched = 0
        self._pending: deque[_Pending] = deque()
        self._talk = Talk(process_group, self._pending.clear)
        self._lock = threading.RLock()
        self._segment = torch.empty(0, dtype=torch.uint8)
        self._ring = Ring(0)
        self._largest = 0  # region for which it was made
        self.frames = Frames()

    @property
    def capacity(self) -> int:
        """Bytes of the segment in which collectives take turns."""
        return self._ring.capacity

    # -- collectives ------------------------------------------------------------------------------

    @without_grad
    def launch(self, meeting: Meeting) -> SharedWork:
        """A collective in flight: this rank's part is written. All ranks launch alike.

        Raises:
            SharedMemoryError: on all ranks, if there is not enough memory.
            PeerLostError: if a rank is waited for, and has ended or does not come in time.
        """
        with self._lock:
            self._talk.check()
            size = aligned(meeting.region)
            if size > self._largest:
                with self._not_halfway():
                    self._fit(size, meeting)
            self._make_room(size)
            with self._not_halfway():
                number = self._talk.next_number()
                start = self._ring.take(number, size)
                work = self._begun(number, meeting, self._segment.narrow(0, start, meeting.region))
            self._take_results()
            return work

    def _begun(self, number: int, meeting: Meeting, region: torch.Tensor) -> SharedWork:
        meeting.write(region)
        pending = _Pending(number, (meeting, region))
        self._pending.append(pending)
        self._talk.say(meeting.kind, self._left, meeting.nbytes, meeting.detail)
        self.launched += 1
        return SharedWork(self, pending)

    @contextmanager
    def _not_halfway(self) -> Iterator[None]:
        """A context that, interrupted, ends the group: the ranks would be out of step."""
        try:
            yield
        except (SharedMemoryError, CollectiveMismatchError):
            raise  # on all ranks, or after telling them
        except BaseException as error:
            self._talk.fail(error, self._talk.ranks[self.rank], MessageKind.ENDED)

    def is_ready(self, pending: _Pending) -> bool:
        """Whether ``finish`` would not wait."""
        with self._lock:
            if pending.open is None or self._talk.failure:
                return True
            return all(peer.has_message(pending.number) for peer in self._talk.peers.values())

    @without_grad
    def finish(self, pending: _Pending, timeout: float | None = None) -> None:
        """Read the result of a collective; nothing if that was done.

        Raises:
            PeerLostError: if a rank has ended, or does not come in ``timeout`` seconds.
            CollectiveMismatchError: if a rank came to another collective.
        """
        talk = self._talk
        with self._lock:
            if pending.open is None:
                return
            talk.check()
            meeting, region = pending.open
            for peer, message in talk.hear(pending.number, timeout).items():
                if not meeting.is_of(message):
                    talk.fail(mismatch(meeting, message, peer.rank), peer.rank, MessageKind.DIFFERS)
            meeting.read(region)
            pending.open = None
            talk.forget(pending.number)
            while self._pending and self._pending[0].open is None:
                self._pending.popleft()

    # -- slots ------------------------------------------------------------------------------------

    def open_slot(self, nbytes: int) -> SharedSlot:
        """A new slot of ``nbytes`` at least. A collective call.

        Raises:
            NoRoomError: on all ranks, if there is not enough memory.
            PeerLostError: if a rank has ended, or does not come in time.
        """
        nbytes = whole_pages(nbytes)

        def take(file: SegmentFile) -> SharedSlot:
            return SharedSlot(self, *self.frames.opened(file, nbytes))

        with self._lock, torch.no_grad():
            self._talk.check()
            with self._not_halfway():
                meeting = slot_meeting(nbytes)
                offer = partial(self.frames.offer, nbytes)
                try:
                    return map_together(self._talk, offer, take, meeting, self._left)
                except NoRoomError:
                    self.frames.refused += 1
                    raise

    @without_grad
    def launch_in(self, slot: SharedSlot, meeting: Meeting) -> SharedWork:
        """See ``SharedSlot.gather``."""
        frame = slot.frame
        with self._lock:
            self._talk.check()
            self._make_room(0)
            self._clear(slot)
            self._talk.wait(lambda peer: peer.has_left_slot(frame.file.inode, frame.turns.taken))
            with self._not_halfway():
                slot.show()
                number = self._talk.next_number()
                self._ring.take(number, 0)  # counted among those that a rank may be ahead by
                work = self._begun(number, meeting, slot.memory)
                frame.take(slot.window, number)
            self._take_results()
            return work

    def _clear(self, slot: SharedSlot) -> None:
        """Leave what this rank itself has in the frame of ``slot``; see [Note: frames]."""
        frame = slot.frame
        if frame.turns.left == frame.turns.taken:
            return
        window = frame.window
        if window is not None and window is not slot.window:
            self._finish_up_to(frame.launched)  # others are yet to write there
            with self._not_halfway():
                window.move_out()
            self.frames.moved_out += 1
        self._say_left(frame)

    def move_out(self, slot: SharedSlot) -> None:
        """See ``SharedSlot.move_out``."""
        with self._lock:
            if not slot.window.moved_out:
                with self._not_halfway():
                    slot.window.move_out()
                self.frames.moved_out += 1

    def leave_slot(self, slot: SharedSlot) -> None:
        """See ``SharedSlot.leave``; nothing to say once the group has failed."""
        with self._lock:
            if slot.window.moved_out:  # which it has left by that
                slot.show()
            else:
                self._say_left(slot.frame)

    def _say_left(self, frame: Frame) -> None:
        frame.turns.left = frame.turns.taken
        self._talk.say(MessageKind.SLOT_LEFT, self._left, frame.file.inode, frame.turns.taken)

    # -- room -------------------------------------------------------------------------------------

    @property
    def _left(self) -> int:
        """How many collectives this rank has left, in order of their numbers."""
        return self._pending[0].number if self._pending else self._talk.numbered

    def _make_room(self, size: int) -> None:
        """Return once the next region of ``size`` bytes may be written.

        See [Note: ahead and behind].
        """
        peers = self._talk.peers
        while (oldest := self._ring.oldest) is not None:
            free = self._left > oldest and all(peer.left > oldest for peer in peers.values())
            if not free:
                if self._ring.has_room(size) and len(self._ring) < MOST_AHEAD:
                    return
                self._leave(oldest)
            self._ring.give_back()

    def _leave(self, number: int) -> None:
        """Return once every rank has left collective ``number``, this one first."""
        self._finish_up_to(number)
        if self._left > self._talk.said_left:
            self._talk.say(MessageKind.LEFT, self._left)
        self._talk.wait(lambda peer: peer.has_left(number + 1))

    def _take_results(self) -> None:
        """End what all others have written their parts of: it keeps gradients no longer."""
        peers = self._talk.peers.values()
        while self._pending:
            first = self._pending[0]
            if not all(peer.has_message(first.number) for peer in peers):
                return
            if not all(peer.has_said(first.number) for peer in peers):
                return  # one is lost: told to who waits for it
            self.finish(first)

    def _finish_up_to(self, number: int) -> None:
        while self._pending and self._pending[0].number <= number:
            self.finish(self._pending[0])

    def _fit(self, size: int, meeting: Meeting) -> None:
        """Make the segment large enough for regions of ``size``."""
        if _HELD * size > self.capacity:
            self._grow(_HELD * size, meeting)
        self._largest = size

    def _grow(self, nbytes: int, meeting: Meeting) -> None:
        """Map a segment of ``nbytes`` at least, in place of the present one."""
        make = partial(SegmentFile.make, whole_pages(nbytes))
        segment = map_together(self._talk, make, map_segment, meeting, self._left)
        while self._pending:  # every rank is here, so it has written its part of them
            self.finish(self._pending[0])
        self._segment, self._ring = segment, Ring(segment.numel())

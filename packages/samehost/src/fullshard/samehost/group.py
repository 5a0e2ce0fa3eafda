"""Runs the collectives of a process group through memory that its ranks map.

A collective has a region of the segment. A rank writes its part there at launch, and sends a
message; ranks read each other's parts at its end. Callers pass functions that write and read.

[Note: ahead and behind] Between launch and end no rank waits for another. A region is written again
after all ranks have left the collective before, as their messages report. A rank can be ahead by
two collectives of the largest size. Before more, it ends its own ones there, and waits for others.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from fullshard.comm import PeerLostError
from fullshard.comm.spi import CHECKS, NOTHING, TIMELINES, marked_work, without_grad
from fullshard.samehost.channel import Channel, NotHalfway, map_together
from fullshard.samehost.collective import (
    Pending,
    SharedCollective,
    gather_in_place,
    mismatch,
)
from fullshard.samehost.frames import Frame, Frames
from fullshard.samehost.pages import Shown, Window, whole_pages
from fullshard.samehost.segment import Ring, SegmentFile, aligned, map_segment
from fullshard.samehost.signals import (
    MOST_AHEAD,
    MessageKind,
    NoRoomError,
    SharedMemoryError,
)

__all__ = ["GROUPS", "SharedBuffer", "SharedGroup", "SharedWork", "shared_group"]

_HELD = 2  # collectives as large as the largest, for which there is room

GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, SharedGroup | str] = (
    weakref.WeakKeyDictionary()
)
"""What ``shared_group`` found for each process group: its shared memory, or why it has none."""


def shared_group(process_group: dist.ProcessGroup) -> SharedGroup:
    """The shared memory of a process group; made at the first call, which is a collective.

    Raises:
        SharedMemoryError: on all ranks, if they are not processes of one host.
    """
    group = GROUPS.get(process_group)
    if group is None:
        try:
            group = SharedGroup(process_group)
        except (SharedMemoryError, PeerLostError) as error:
            group = str(error)
        GROUPS[process_group] = group
    if isinstance(group, str):
        raise SharedMemoryError(group)
    return group


class SharedWork(dist.Work):
    """The handle of a collective in shared memory; ``wait()`` ends it."""

    def __init__(self, group: SharedGroup, pending: Pending) -> None:
        super().__init__()
        self._group, self._pending = group, pending

    def is_completed(self) -> bool:
        """Whether ``wait()`` would not wait for another rank."""
        return self._group.is_ready(self._pending)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Read the result, once every rank has written its part; later calls do nothing.

        Args:
            timeout: how long to wait for a rank; 0: the timeout of the process group.

        Raises:
            PeerLostError: if a rank has ended, or does not come in time.
            CollectiveMismatchError: if a rank came to another collective.
        """
        if self._pending.open is not None:
            self._group.finish(self._pending, timeout.total_seconds() or None)
        return True


class SharedBuffer:
    """Memory that all ranks map, in which gathers leave full tensors for them to use in place.

    Attributes:
        window: where this process has them.
        frame: the pages that others may show too; see [Note: frames].
        memory: what they map, ``[n]`` uint8.
        number: its number among the buffers of the process group, from 1.
    """

    def __init__(self, group: SharedGroup, window: Window, frame: Frame, number: int) -> None:
        self.number = number
        self.window = window
        self.frame = frame
        self.memory = window.memory()
        self._used = False
        self._group = group

    def gather(self, write: Callable[[], None]) -> SharedWork:
        """A gather in flight, once no rank reads the result of the one before.

        ``write`` has stored this rank's part. The others' parts are there once the handle
        was waited for; after that, and before the next gather, call ``leave()``.

        Raises:
            PeerLostError: if a rank has ended, or does not leave in time.
        """
        self._used = True
        return self._group.gather_in(self, write)

    def show(self) -> None:
        """Show the pages of the frame, if the window shows others."""
        if self.window.shown is not Shown.FILE:
            self.window.show(self.frame.file.fd)

    def rest(self) -> None:
        """Show what a buffer shows that this rank does not use: poison, if there are ``CHECKS``."""
        if CHECKS:
            self.window.poison()
        else:
            self.show()

    def move_out(self) -> None:
        """Show private pages, until ``leave()``; see [Note: frames]."""
        self._group.move_out(self)

    def leave(self) -> None:
        """Report, once, that this rank has finished reading: others may write over it."""
        if self._used:
            self._used = False
            self._group.leave_buffer(self)
        else:
            self.rest()


class SharedGroup:
    """The segments of one process group, and the collectives in flight in them.

    Attributes:
        rank: this rank's in the process group.
        world_size: how many ranks there are.
        launched: collectives launched so far.
        spans: spans of large collectives that are done so far.
        channel: to the other ranks.
        frames: pages of the buffers.
        not_halfway: a context for work that other ranks can use only when it is complete.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        """Find the other ranks: a collective call.

        Raises:
            SharedMemoryError: on all ranks, if they are not processes of one host.
        """
        self.rank = process_group.rank()
        self.world_size = process_group.size()
        self.launched = self.spans = 0
        self._pending: deque[Pending] = deque()
        self.channel = Channel(process_group, self._pending)
        self.not_halfway = NotHalfway(self.channel)
        self._lock = threading.RLock()
        self._segment = torch.empty(0, dtype=torch.uint8)
        self._ring = Ring(0)
        self._largest = 0  # region for which it was made
        self._opened = 0  # buffers, those without room included: a collective call counts them
        self.frames = Frames(self._lock)

    @property
    def capacity(self) -> int:
        """Bytes of the segment in which collectives take turns."""
        return self._ring.capacity

    # -- collectives ------------------------------------------------------------------------------

    @without_grad
    def launch(self, collective: SharedCollective) -> SharedWork:
        """A collective in flight: this rank's part is written. All ranks launch alike.

        Raises:
            SharedMemoryError: on all ranks, if there is not enough memory.
            PeerLostError: if a rank is waited for, and has ended or does not come in time.
        """
        with self._lock:
            self.channel.check()
            size = aligned(collective.region)
            if size > self._largest:
                with self.not_halfway:
                    self._fit(size, collective)
            self._make_room(size)
            with self.not_halfway:
                number = self.channel.next_number()
                start = self._ring.take(number, size)
                region = self._segment.narrow(0, start, collective.region)
                collective.write(region)
                work = self._begun(number, collective, region)
            self._take_results()
            return work

    def _begun(self, number: int, collective: SharedCollective, region: torch.Tensor) -> SharedWork:
        """Report that this rank's part is in ``region``."""
        pending = Pending(number, (collective, region))
        self._pending.append(pending)
        self.channel.send(collective.kind, collective.nbytes, collective.detail)
        self.launched += 1
        return SharedWork(self, pending)

    def is_ready(self, pending: Pending) -> bool:
        """Whether ``finish`` would not wait."""
        with self._lock:
            over, peers = pending.open is None or self.channel.failure, self.channel.peers.values()
            return bool(over) or all(peer.has_message(pending.number) for peer in peers)

    @without_grad
    def finish(self, pending: Pending, timeout: float | None = None) -> None:
        """Read the result of a collective; nothing if that was done.

        Raises:
            PeerLostError: if a rank has ended, or does not come in ``timeout`` seconds.
            CollectiveMismatchError: if a rank came to another collective.
        """
        channel = self.channel
        with self._lock:
            if pending.open is None:
                return
            channel.check()
            collective, region = pending.open
            for peer, message in channel.receive(pending.number, timeout).items():
                if not collective.is_of(message):
                    channel.fail(
                        mismatch(collective, message, peer.rank), peer.rank, MessageKind.DIFFERS
                    )
            with marked_work() if TIMELINES else NOTHING:
                collective.read(region)
            pending.open = None
            channel.forget(pending.number)
            while self._pending and self._pending[0].open is None:
                self._pending.popleft()

    # -- shared buffers ---------------------------------------------------------------------------

    def open_shared_buffer(self, nbytes: int) -> SharedBuffer:
        """A new buffer of ``nbytes`` at least. A collective call.

        Raises:
            NoRoomError: on all ranks, if there is not enough memory.
            PeerLostError: if a rank has ended, or does not come in time.
        """
        nbytes = whole_pages(nbytes)

        def take(file: SegmentFile) -> SharedBuffer:
            window, frame = self.frames.opened(file, nbytes)
            return SharedBuffer(self, window, frame, number)

        with self._lock, torch.no_grad():
            self.channel.check()
            self._opened = number = self._opened + 1
            with self.not_halfway:
                collective = gather_in_place(nbytes, number)
                offer = partial(self.frames.offer, nbytes)
                try:
                    return map_together(self.channel, offer, take, collective)
                except NoRoomError:
                    self.frames.refused += 1
                    raise

    @without_grad
    def gather_in(self, buffer: SharedBuffer, write: Callable[[], None]) -> SharedWork:
        """See ``SharedBuffer.gather``."""
        frame = buffer.frame
        collective = gather_in_place(buffer.memory.numel(), buffer.number)
        with self._lock:
            self.channel.check()
            self._make_room(0)
            self._clear(buffer)
            self.channel.wait(
                lambda peer: peer.has_left_buffer(frame.file.inode, frame.turns.taken)
            )
            with self.not_halfway:
                buffer.show()
                frame.hold()
                number = self.channel.next_number()
                self._ring.take(number, 0)  # counted among those that a rank may be ahead by
                write()
                work = self._begun(number, collective, buffer.memory)
                frame.take(buffer.window, number)
                return work

    def _clear(self, buffer: SharedBuffer) -> None:
        """Leave what this rank itself has in the frame of ``buffer``; see [Note: frames]."""
        frame = buffer.frame
        if frame.turns.left == frame.turns.taken:
            return
        window = frame.window
        if window is not None and window is not buffer.window:
            self._finish_up_to(frame.launched)  # others are yet to write there
            with self.not_halfway:
                window.move_out()
            self.frames.moved_out += 1
        self._say_left(frame)

    def move_out(self, buffer: SharedBuffer) -> None:
        """See ``SharedBuffer.move_out``."""
        with self._lock:
            if buffer.window.shown is not Shown.PRIVATE:
                frame = buffer.frame
                reads = frame.window is buffer.window and frame.turns.left != frame.turns.taken
                with self.not_halfway:
                    buffer.window.move_out()
                self.frames.moved_out += 1
                if reads:
                    self._say_left(frame)

    def leave_buffer(self, buffer: SharedBuffer) -> None:
        """See ``SharedBuffer.leave``; nothing to say once the group has failed."""
        with self._lock, self.not_halfway:
            left = buffer.window.shown is Shown.PRIVATE  # by moving out
            buffer.rest()  # before others write to the frame
            if not left:
                self._say_left(buffer.frame)

    def _say_left(self, frame: Frame) -> None:
        frame.turns.left = frame.turns.taken
        self.channel.send(MessageKind.BUFFER_LEFT, frame.file.inode, frame.turns.taken)

    # -- room -------------------------------------------------------------------------------------

    def _make_room(self, size: int) -> None:
        """Return once the next region of ``size`` bytes may be written.

        See [Note: ahead and behind].
        """
        ring, left = self._ring, self._left_by_all()
        while (oldest := ring.oldest) is not None:
            if oldest >= left:
                if ring.has_room(size) and len(ring) < MOST_AHEAD:
                    return
                self._leave(oldest)
                left = self._left_by_all()
            ring.release_oldest()

    def _left_by_all(self) -> int:
        """How many collectives every rank is known to have left."""
        return min([self.channel.left, *(peer.left for peer in self.channel.peers.values())])

    def _leave(self, number: int) -> None:
        """Return once every rank has left collective ``number``, this one first."""
        self._finish_up_to(number)
        if self.channel.left > self.channel.told_left:
            self.channel.send(MessageKind.LEFT)
        self.channel.wait(lambda peer: peer.left > number)

    def _take_results(self) -> None:
        """End what all others have written their parts of: it keeps gradients no longer."""
        peers = self.channel.peers.values()
        while self._pending:
            first = self._pending[0]
            number = first.number
            if not all(peer.has_message(number) and peer.has_sent(number) for peer in peers):
                return  # if a rank is lost, the wait for it raises
            self.finish(first)

    def _finish_up_to(self, number: int) -> None:
        while self._pending and self._pending[0].number <= number:
            self.finish(self._pending[0])

    def _fit(self, size: int, collective: SharedCollective) -> None:
        """Make the segment large enough for regions of ``size``: map another instead."""
        if _HELD * size > self.capacity:
            make = partial(SegmentFile.make, whole_pages(_HELD * size))
            segment = map_together(self.channel, make, map_segment, collective)
            while self._pending:  # every rank is here, so it has written its part of them
                self.finish(self._pending[0])
            self._segment, self._ring = segment, Ring(segment.numel())
        self._largest = size

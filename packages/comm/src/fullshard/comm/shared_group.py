"""The ranks of a process group that meet in shared memory.

Owns: the segment that they map, and the life of a collective in it. A collective has a region of
the segment. At its launch each rank writes its part there and says so; at its end each rank reads
what the others wrote. Refuses: knowing what is written and read: callers hand in both.

[Note: ahead and behind] Between launch and end no rank needs another to do anything: a rank that
computes does not keep the others waiting. A region is written again once every rank has left the
collective before, which each says with its next message. So a rank can be ahead of the others by as
many collectives as the segment holds, two of the largest at least. A rank that would be further
ahead first ends those of its own that lie in the way, then waits for the others to do so: they
will, at the latest when they come to the same collective.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from fullshard.comm import compat
from fullshard.comm.rollcall import CollectiveMismatchError
from fullshard.comm.shared_meeting import Meeting, mismatch
from fullshard.comm.shared_peers import connect, global_ranks
from fullshard.comm.shared_segment import Ring, SegmentFile, aligned, map_segment
from fullshard.comm.shared_signals import (
    MOST_AHEAD,
    Message,
    MessageKind,
    NoRoomError,
    Peer,
    PeerLostError,
    SharedMemoryError,
)

__all__ = ["SharedGroup", "SharedWork", "shared_group"]

_SMALLEST = 1 << 20  # bytes of a segment

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


@dataclass(eq=False)
class _Pending:
    """A collective that was launched; ``region`` is None once it has ended."""

    number: int
    meeting: Meeting
    region: torch.Tensor | None


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


class SharedGroup:
    """The segment of one process group, and the collectives in flight in it.

    Attributes:
        rank: this rank's in the process group.
        world_size: how many ranks there are.
        launched: collectives launched so far.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        """Finds the other ranks: a collective call.

        Raises:
            SharedMemoryError: on all ranks, if they are not processes of one host.
        """
        self.rank = process_group.rank()
        self.world_size = process_group.size()
        self.launched = 0
        self._ranks = global_ranks(process_group)
        self._peers: dict[int, Peer] = connect(process_group)
        self._close = weakref.finalize(self, _close, self._peers)
        self._process_group = weakref.ref(process_group)
        self._patience = timedelta(0)
        self._lock = threading.RLock()
        self._segment = torch.empty(0, dtype=torch.uint8)
        self._ring = Ring(0)
        self._numbered = 0
        self._said_left = 0
        self._pending: deque[_Pending] = deque()
        self._failure = ""

    @property
    def capacity(self) -> int:
        """Bytes of the segment."""
        return self._ring.capacity

    # -- collectives ------------------------------------------------------------------------------

    def launch(self, meeting: Meeting) -> SharedWork:
        """A collective in flight: this rank's part is written. All ranks launch alike.

        Raises:
            SharedMemoryError: on all ranks, if there is not enough memory.
            PeerLostError: if a rank is waited for, and has ended or does not come in time.
        """
        with self._lock, torch.no_grad():
            self._check()
            size = aligned(meeting.region)
            with self._not_halfway():
                if 2 * size > self.capacity:
                    self._grow(2 * size, meeting)
            self._make_room(size)
            with self._not_halfway():
                number = self._next_number()
                start = self._ring.take(number, size)
                region = self._segment.narrow(0, start, meeting.region)
                meeting.write(region)
                pending = _Pending(number, meeting, region)
                self._pending.append(pending)
                self._say(meeting.kind, meeting.nbytes, meeting.detail)
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
            self._fail(error, self._ranks[self.rank], MessageKind.ENDED)

    def is_ready(self, pending: _Pending) -> bool:
        """Whether ``finish`` would not wait."""
        with self._lock:
            if pending.region is None or self._failure:
                return True
            return all(peer.has_message(pending.number) for peer in self._peers.values())

    def finish(self, pending: _Pending, timeout: float | None = None) -> None:
        """Read the result of a collective; nothing if that was done.

        Raises:
            PeerLostError: if a rank has ended, or does not come in ``timeout`` seconds.
            CollectiveMismatchError: if a rank came to another collective.
        """
        with self._lock, torch.no_grad():
            if pending.region is None:
                return
            self._check()
            meeting = pending.meeting
            for peer, message in self._hear(pending.number, timeout).items():
                if not meeting.is_of(message):
                    self._fail(
                        mismatch(meeting, message, peer.rank), peer.rank, MessageKind.DIFFERS
                    )
            meeting.read(pending.region)
            pending.region = None
            self._forget(pending.number)
            while self._pending and self._pending[0].region is None:
                self._pending.popleft()

    # -- room -------------------------------------------------------------------------------------

    @property
    def _left(self) -> int:
        """How many collectives this rank has left, in order of their numbers."""
        return self._pending[0].number if self._pending else self._numbered

    def _make_room(self, size: int) -> None:
        """Return once the next region of ``size`` bytes may be written.

        See [Note: ahead and behind].
        """
        while (oldest := self._ring.oldest) is not None:
            free = self._left > oldest and all(peer.left > oldest for peer in self._peers.values())
            if not free:
                if self._ring.has_room(size) and len(self._ring) < MOST_AHEAD:
                    return
                self._leave(oldest)
            self._ring.give_back()

    def _leave(self, number: int) -> None:
        """Return once every rank has left collective ``number``, this one first."""
        while self._pending and self._pending[0].number <= number:
            self.finish(self._pending[0])
        if self._left > self._said_left:
            self._say(MessageKind.LEFT)
        timeout = self._timeout()
        for peer in self._peers.values():
            try:
                peer.wait_left(number + 1, timeout)
            except PeerLostError as error:
                self._fail(error, error.rank, error.kind)

    def _grow(self, nbytes: int, meeting: Meeting) -> None:
        """Map a segment of ``nbytes`` at least, in place of the present one."""
        nbytes = max(_SMALLEST, -(-nbytes // _SMALLEST) * _SMALLEST)
        file, problem = self._offered(nbytes, meeting)
        segment = None
        try:
            if file is not None:
                segment = map_segment(file)
        except OSError as error:
            problem = error.errno or errno.EIO
        try:
            problems = self._problems(problem, meeting)
        finally:
            if file is not None:
                file.close()  # every rank has it open, or never will
        for rank, problem in sorted(problems.items()):
            if problem:
                raise NoRoomError(
                    f"no room for {nbytes} bytes of shared memory: {os.strerror(problem)} (rank "
                    f"{rank}). Free memory, communicate in smaller groups, or use "
                    "ProcessGroupTransport()."
                )
        assert segment is not None
        while self._pending:  # every rank is here, so it has written its part of them
            self.finish(self._pending[0])
        self._segment, self._ring = segment, Ring(nbytes)

    def _problems(self, mine: int, meeting: Meeting) -> dict[int, int]:
        """What kept each rank from mapping the new segment, as an error number or 0."""
        number = self._next_number()
        self._say(MessageKind.MAPPED, mine)
        problems = {self._ranks[self.rank]: mine}
        for peer, message in self._hear(number).items():
            self._expect((MessageKind.MAPPED,), peer, message, meeting)
            problems[peer.rank] = message.value
        self._forget(number)
        return problems

    def _offered(self, nbytes: int, meeting: Meeting) -> tuple[SegmentFile | None, int]:
        """The segment that the first rank makes, or the number of the error why there is none."""
        made, problem = None, 0
        if self.rank == 0:
            try:
                made = SegmentFile.make(nbytes)
            except OSError as error:
                problem = error.errno or errno.EIO
        number = self._next_number()
        if problem:
            self._say(MessageKind.REFUSED, problem)
        else:
            self._say(MessageKind.OFFER, *((made.fd, made.inode) if made is not None else ()))
        heard = self._hear(number)
        for peer, message in heard.items():
            self._expect((MessageKind.OFFER, MessageKind.REFUSED), peer, message, meeting)
        self._forget(number)
        if self.rank == 0:
            return made, problem
        first = self._peers[0]
        message = heard[first]
        if message.kind == MessageKind.REFUSED:
            return None, message.value
        try:
            return SegmentFile.open(first.process, message.value, message.detail), 0
        except OSError as error:
            return None, error.errno or errno.EIO

    def _expect(
        self, kinds: tuple[MessageKind, ...], peer: Peer, message: Message, meeting: Meeting
    ) -> None:
        if message.kind not in kinds:
            self._fail(mismatch(meeting, message, peer.rank), peer.rank, MessageKind.DIFFERS)

    # -- what is said and heard -------------------------------------------------------------------

    def _next_number(self) -> int:
        number = self._numbered
        self._numbered += 1
        return number

    def _say(self, kind: MessageKind, value: int = 0, detail: int = 0) -> None:
        self._said_left = self._left
        message = Message(kind, self._said_left, value, detail)
        for peer in self._peers.values():
            peer.send(message)

    def _hear(self, number: int, timeout: float | None = None) -> dict[Peer, Message]:
        """Every other rank's message ``number``."""
        timeout = self._timeout() if timeout is None else timeout
        peers = list(self._peers.values())
        for peer in peers:
            try:
                peer.wait_message(number, timeout)
            except PeerLostError as error:
                self._fail(error, error.rank, error.kind)
        return {peer: peer.message(number) for peer in peers}

    def _forget(self, number: int) -> None:
        """Drop every other rank's message ``number``: it was acted on."""
        for peer in self._peers.values():
            peer.forget_message(number)

    def _timeout(self) -> float:
        process_group = self._process_group()
        if process_group is not None:
            self._patience = compat.timeout_of(process_group)
        return self._patience.total_seconds()

    # -- failure ----------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._failure:
            raise SharedMemoryError(
                f"the shared memory of this process group is out of use since: {self._failure}"
            )

    def _fail(self, error: BaseException, culprit: int, kind: int) -> NoReturn:
        """Raise ``error``, after telling the others."""
        if kind == MessageKind.DIFFERS and isinstance(error, PeerLostError):
            error = CollectiveMismatchError(f"{error} Look at the error of that rank.")
        self._failure = str(error) or type(error).__name__
        for peer in self._peers.values():
            peer.send(Message(kind, self._said_left, culprit, 0))
        self._pending.clear()
        self._close()
        raise error


def _close(peers: dict[int, Peer]) -> None:
    for peer in peers.values():
        peer.close()
    peers.clear()

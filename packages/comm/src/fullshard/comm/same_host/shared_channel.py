"""Sends numbered messages to the other ranks of a process group, and waits for theirs.

Owns: the numbers of messages, the first failure (which stops messages and is sent to all ranks),
how long a rank waits, and two rounds of messages in which all ranks map one segment or none does.
Refuses: knowing the content of the memory that messages refer to.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch.distributed as dist

from fullshard.comm.runtime import compat
from fullshard.comm.runtime.observer import TIMELINES, CollectiveMismatchError, Mark, marked_wait
from fullshard.comm.runtime.ranges import NOTHING
from fullshard.comm.same_host.shared_collective import Pending, SharedCollective, mismatch
from fullshard.comm.same_host.shared_peers import connect
from fullshard.comm.same_host.shared_segment import SegmentFile
from fullshard.comm.same_host.shared_signals import (
    FORMAT,
    Message,
    MessageKind,
    NoRoomError,
    Peer,
    PeerLostError,
    SharedMemoryError,
)

__all__ = ["Channel", "NotHalfway", "map_together"]

_T = TypeVar("_T")


class Channel:
    """This rank's side of the pipes between all ranks of a process group.

    Attributes:
        rank: this rank's in the process group.
        ranks: all ranks' in the default process group.
        peers: the other ranks, by rank in the process group; none after a failure.
        numbered: messages numbered so far; ranks at the same collective have equal numbers.
        pending: the collectives that this rank has not ended, in order of their numbers; none after
            a failure.
        told_left: how many collectives the others know this rank to have left.
        failure: why no more is sent; empty while messages go.
    """

    def __init__(self, process_group: dist.ProcessGroup, pending: deque[Pending]) -> None:
        """Find the other ranks: a collective call. ``pending`` belongs to the caller.

        Raises:
            SharedMemoryError: on all ranks, if they are not processes of one host.
        """
        self.rank = process_group.rank()
        self.ranks = dist.get_process_group_ranks(process_group)
        self.peers: dict[int, Peer] = connect(process_group)
        self.pending = pending
        self.numbered = 0
        self.told_left = 0
        self.failure = ""
        self._close = weakref.finalize(self, _close, self.peers)
        self._process_group = weakref.ref(process_group)
        self._patience = timedelta(0)

    @property
    def left(self) -> int:
        """How many collectives this rank has left, in order of their numbers."""
        return self.pending[0].number if self.pending else self.numbered

    def next_number(self) -> int:
        """The number of the next message of every rank."""
        number = self.numbered
        self.numbered += 1
        return number

    def send(self, kind: MessageKind, value: int = 0, detail: int = 0) -> None:
        """Send a message, with the number of collectives that this rank has left, to all others."""
        self.told_left = self.left
        packed = FORMAT.pack(kind, self.told_left, value, detail)
        for peer in self.peers.values():
            peer.send(packed)

    def receive(self, number: int, timeout: float | None = None) -> dict[Peer, Message]:
        """Every other rank's message ``number``.

        Raises:
            PeerLostError: if a rank has ended, or does not come in ``timeout`` seconds.
        """
        self.wait(lambda peer: peer.has_sent(number), timeout)
        return {peer: peer.messages[number] for peer in self.peers.values()}

    def wait(self, done: Callable[[Peer], bool], timeout: float | None = None) -> None:
        """Return once ``done`` is true of every other rank; if one is lost, tell all.

        Raises:
            PeerLostError: as ``receive``.
        """
        late = [peer for peer in self.peers.values() if not done(peer)]
        if not late:
            return
        with marked_wait(Mark.WAIT, "shared memory") if TIMELINES else NOTHING:
            try:
                for peer in late:
                    peer.wait(done, self.timeout if timeout is None else lambda: timeout)
            except PeerLostError as error:
                self.fail(error, error.rank, error.kind)

    def forget(self, number: int) -> None:
        """Drop every other rank's message ``number``: it was acted on."""
        for peer in self.peers.values():
            del peer.messages[number]

    def exchange(
        self,
        kinds: tuple[MessageKind, ...],
        mine: SharedCollective,
        kind: MessageKind,
        value: int = 0,
        detail: int = 0,
    ) -> dict[Peer, Message]:
        """Send a message, and return every other rank's, which must have one of ``kinds``.

        Raises:
            PeerLostError: as ``receive``.
            CollectiveMismatchError: if a rank sends another kind, in place of ``mine``.
        """
        number = self.next_number()
        self.send(kind, value, detail)
        heard = self.receive(number)
        for peer, message in heard.items():
            if message.kind not in kinds:
                self.fail(mismatch(mine, message, peer.rank), peer.rank, MessageKind.DIFFERS)
        self.forget(number)
        return heard

    def timeout(self) -> float:
        """Seconds to wait for a rank: the timeout of the process group."""
        process_group = self._process_group()
        if process_group is not None:
            self._patience = compat.timeout_of(process_group)
        return self._patience.total_seconds()

    def check(self) -> None:
        """Raise if a failure has ended it."""
        if self.failure:
            raise SharedMemoryError(
                f"the shared memory of this process group is out of use since: {self.failure} Call "
                "reset_shared_memory() on all ranks, and shard a new model."
            )

    def fail(self, error: BaseException, culprit: int, kind: int) -> NoReturn:
        """Raise ``error``, after telling the others."""
        if kind == MessageKind.DIFFERS and isinstance(error, PeerLostError):
            error = CollectiveMismatchError(f"{error} Look at the error of that rank.")
        self.failure = str(error) or type(error).__name__
        packed = FORMAT.pack(kind, self.told_left, culprit, 0)
        for peer in self.peers.values():
            peer.send(packed)
        self._close()
        self.pending.clear()
        raise error


class NotHalfway:
    """A context that, interrupted, ends the group: the ranks would be out of step."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        channel = self._channel
        if error is None or isinstance(error, SharedMemoryError | CollectiveMismatchError):
            return  # raised on all ranks, or after telling them
        channel.fail(error, channel.ranks[channel.rank], MessageKind.ENDED)


def _close(peers: dict[int, Peer]) -> None:
    for peer in peers.values():
        peer.close()
    peers.clear()


def map_together(
    channel: Channel,
    offer: Callable[[], SegmentFile],
    take: Callable[[SegmentFile], _T],
    collective: SharedCollective,
) -> _T:
    """Return the result of ``take`` for the segment that the first rank offers. A collective.

    Args:
        channel: to the other ranks.
        offer: gives the segment; called on the first rank. Its descriptor is closed after all.
        take: maps it; called on every rank.
        collective: the collective for which it is wanted, to be named in errors.

    Raises:
        NoRoomError: on all ranks, if there is not enough memory on one; nothing has changed then.
        PeerLostError: if a rank has ended, or does not come in time.
        CollectiveMismatchError: if a rank called a different collective.
    """
    file, problem = _offered(channel, offer, collective)
    taken: list[_T] = []
    try:
        if file is not None:
            taken.append(take(file))
    except OSError as error:
        problem = error.errno or errno.EIO
    mapped = MessageKind.MAPPED
    try:
        heard = channel.exchange((mapped,), collective, mapped, problem)
    finally:
        if file is not None:
            file.close()  # every rank has opened it, or will not open it
    problems = {peer.rank: message.value for peer, message in heard.items()}
    problems[channel.ranks[channel.rank]] = problem
    for rank, problem in sorted(problems.items()):
        if problem:
            raise NoRoomError(
                f"no room for {collective.region} bytes of shared memory: {os.strerror(problem)} "
                f"(rank {rank}). Free memory, communicate in smaller groups, or use "
                "ProcessGroupTransport()."
            )
    return taken[0]


def _offered(
    channel: Channel, offer: Callable[[], SegmentFile], collective: SharedCollective
) -> tuple[SegmentFile | None, int]:
    """The segment that the first rank offers, or the number of the error why there is none."""
    made: SegmentFile | None = None
    problem = 0
    if channel.rank == 0:
        try:
            made = offer()
        except OSError as error:
            problem = error.errno or errno.EIO
    kinds = MessageKind.OFFER, MessageKind.REFUSED
    if problem:
        heard = channel.exchange(kinds, collective, MessageKind.REFUSED, problem)
    else:
        given = (made.fd, made.inode) if made is not None else ()
        heard = channel.exchange(kinds, collective, MessageKind.OFFER, *given)
    if channel.rank == 0:
        return made, problem
    first = channel.peers[0]
    message = heard[first]
    if message.kind == MessageKind.REFUSED:
        return None, message.value
    try:
        return SegmentFile.open(first.process, message.value, message.detail), 0
    except OSError as error:
        return None, error.errno or errno.EIO

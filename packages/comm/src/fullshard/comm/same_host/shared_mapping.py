"""Maps one segment on all ranks: the first rank offers it, the others open it.

Owns: the two rounds of messages, and that all ranks map it or none does. Refuses: making it, and
knowing what it is for.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import TypeVar

from fullshard.comm.same_host.shared_channel import Channel
from fullshard.comm.same_host.shared_collective import SharedCollective
from fullshard.comm.same_host.shared_segment import SegmentFile
from fullshard.comm.same_host.shared_signals import MessageKind, NoRoomError

__all__ = ["map_together"]

_T = TypeVar("_T")


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
    try:
        problems = _problems(channel, problem, collective)
    finally:
        if file is not None:
            file.close()  # every rank has opened it, or will not open it
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
    number = channel.next_number()
    if problem:
        channel.send(MessageKind.REFUSED, problem)
    else:
        channel.send(MessageKind.OFFER, *((made.fd, made.inode) if made is not None else ()))
    heard = channel.receive(number)
    for peer, message in heard.items():
        channel.expect((MessageKind.OFFER, MessageKind.REFUSED), peer, message, collective)
    channel.forget(number)
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


def _problems(channel: Channel, mine: int, collective: SharedCollective) -> dict[int, int]:
    """Return the error number that prevented the mapping of the new segment, or 0, per rank."""
    number = channel.next_number()
    channel.send(MessageKind.MAPPED, mine)
    problems = {channel.ranks[channel.rank]: mine}
    for peer, message in channel.receive(number).items():
        channel.expect((MessageKind.MAPPED,), peer, message, collective)
        problems[peer.rank] = message.value
    channel.forget(number)
    return problems

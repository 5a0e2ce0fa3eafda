"""How ranks come to map the same segment: the first offers it, the others open it.

Owns: the two rounds of messages, and that all ranks map it or none does. Refuses: making it, and
knowing what it is for.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import TypeVar

from fullshard.comm.same_host.shared_meeting import Meeting
from fullshard.comm.same_host.shared_segment import SegmentFile
from fullshard.comm.same_host.shared_signals import MessageKind, NoRoomError
from fullshard.comm.same_host.shared_talk import Talk

__all__ = ["map_together"]

_T = TypeVar("_T")


def map_together(
    talk: Talk,
    offer: Callable[[], SegmentFile],
    take: Callable[[SegmentFile], _T],
    meeting: Meeting,
    left: int,
) -> _T:
    """What ``take`` makes of the segment that the first rank offers. A collective.

    Args:
        talk: the ranks.
        offer: gives the segment; called on the first rank. Its descriptor is closed after all.
        take: maps it; called on every rank.
        meeting: the collective for which it is wanted, to be named in errors.
        left: how many collectives this rank has left.

    Raises:
        NoRoomError: on all ranks, if there is not enough memory on one; nothing has changed then.
        PeerLostError: if a rank has ended, or does not come in time.
        CollectiveMismatchError: if a rank came to something else.
    """
    file, problem = _offered(talk, offer, meeting, left)
    taken: list[_T] = []
    try:
        if file is not None:
            taken.append(take(file))
    except OSError as error:
        problem = error.errno or errno.EIO
    try:
        problems = _problems(talk, problem, meeting, left)
    finally:
        if file is not None:
            file.close()  # every rank has it open, or never will
    for rank, problem in sorted(problems.items()):
        if problem:
            raise NoRoomError(
                f"no room for {meeting.region} bytes of shared memory: {os.strerror(problem)} "
                f"(rank {rank}). Free memory, communicate in smaller groups, or use "
                "ProcessGroupTransport()."
            )
    return taken[0]


def _offered(
    talk: Talk, offer: Callable[[], SegmentFile], meeting: Meeting, left: int
) -> tuple[SegmentFile | None, int]:
    """The segment that the first rank offers, or the number of the error why there is none."""
    made: SegmentFile | None = None
    problem = 0
    if talk.rank == 0:
        try:
            made = offer()
        except OSError as error:
            problem = error.errno or errno.EIO
    number = talk.next_number()
    if problem:
        talk.say(MessageKind.REFUSED, left, problem)
    else:
        talk.say(MessageKind.OFFER, left, *((made.fd, made.inode) if made is not None else ()))
    heard = talk.hear(number)
    for peer, message in heard.items():
        talk.expect((MessageKind.OFFER, MessageKind.REFUSED), peer, message, meeting)
    talk.forget(number)
    if talk.rank == 0:
        return made, problem
    first = talk.peers[0]
    message = heard[first]
    if message.kind == MessageKind.REFUSED:
        return None, message.value
    try:
        return SegmentFile.open(first.process, message.value, message.detail), 0
    except OSError as error:
        return None, error.errno or errno.EIO


def _problems(talk: Talk, mine: int, meeting: Meeting, left: int) -> dict[int, int]:
    """What kept each rank from mapping the new segment, as an error number or 0."""
    number = talk.next_number()
    talk.say(MessageKind.MAPPED, left, mine)
    problems = {talk.ranks[talk.rank]: mine}
    for peer, message in talk.hear(number).items():
        talk.expect((MessageKind.MAPPED,), peer, message, meeting)
        problems[peer.rank] = message.value
    talk.forget(number)
    return problems

"""How ranks come to map the same new segment: the first makes it, the others open it.

Owns: the two rounds of messages, and that all ranks map it or none does. Refuses: knowing what the
segment is for.
"""

from __future__ import annotations

import errno
import os

import torch

from fullshard.comm.shared_meeting import Meeting
from fullshard.comm.shared_segment import SegmentFile, map_segment
from fullshard.comm.shared_signals import MessageKind, NoRoomError
from fullshard.comm.shared_talk import Talk

__all__ = ["map_together"]

_PAGE = 1 << 12  # bytes


def map_together(
    talk: Talk, nbytes: int, meeting: Meeting, left: int, spare: float = 0.0
) -> torch.Tensor:
    """A new segment of ``nbytes``, in whole pages, as every rank sees it: ``[n]``, uint8.

    A collective.

    Args:
        talk: the ranks.
        nbytes: how large; the same on all ranks.
        meeting: the collective for which it is wanted, to be named in errors.
        left: how many collectives this rank has left.
        spare: part of the host's memory that it must leave.

    Raises:
        NoRoomError: on all ranks, if there is not enough memory on one; nothing has changed then.
        PeerLostError: if a rank has ended, or does not come in time.
        CollectiveMismatchError: if a rank came to something else.
    """
    nbytes = max(1, -(-nbytes // _PAGE)) * _PAGE
    file, problem = _offered(talk, nbytes, meeting, left, spare)
    segment = None
    try:
        if file is not None:
            segment = map_segment(file)
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
                f"no room for {nbytes} bytes of shared memory: {os.strerror(problem)} (rank "
                f"{rank}). Free memory, communicate in smaller groups, or use "
                "ProcessGroupTransport()."
            )
    assert segment is not None
    return segment


def _offered(
    talk: Talk, nbytes: int, meeting: Meeting, left: int, spare: float
) -> tuple[SegmentFile | None, int]:
    """The segment that the first rank makes, or the number of the error why there is none."""
    made, problem = None, 0
    if talk.rank == 0:
        try:
            made = SegmentFile.make(nbytes, spare)
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

"""Connects the ranks of a process group by pipes, if they are processes of one host.

Owns: two collectives of the process group, in which ranks check that they share a host and open the
pipes of other ranks. All ranks raise the same error if this fails. Refuses: sending anything
through the pipes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist

from fullshard.comm.spi import host_identity
from fullshard.samehost.signals import Peer, SharedMemoryError

__all__ = ["connect"]

_T = TypeVar("_T")


def connect(process_group: dist.ProcessGroup) -> dict[int, Peer]:
    """Connect to the other ranks of ``process_group``, and return them by rank. A collective call.

    Raises:
        SharedMemoryError: on all ranks, if they are not processes of one host.
    """
    rank, ranks = process_group.rank(), dist.get_process_group_ranks(process_group)
    others = [other for other in range(len(ranks)) if other != rank]
    with contextlib.ExitStack() as handed_over, contextlib.ExitStack() as kept:
        inboxes: dict[int, int] = {}
        outboxes: dict[int, int] = {}
        record = _Record(host_identity(), os.getpid())
        try:
            for other in others:
                inboxes[other], end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                kept.callback(os.close, inboxes[other])
                handed_over.callback(os.close, end)  # once the other has opened it
                record.pipes[other] = (end, os.fstat(end).st_ino)
        except OSError as error:
            record.problem = f"rank {ranks[rank]} cannot make its pipes: {error}"
        records = _exchange(record, process_group)
        _raise_alike([*(each.problem for each in records), _not_one_host(records, ranks)])
        problem = ""
        for other in others:
            try:
                outboxes[other] = _open(records[other].process, *records[other].pipes[rank])
                kept.callback(os.close, outboxes[other])
            except OSError as error:
                problem = f"rank {ranks[rank]} cannot reach rank {ranks[other]}: {error}"
        _raise_alike(_exchange(problem, process_group))
        kept.pop_all()  # the peers close them from now on
    return {
        other: Peer(ranks[other], records[other].process, inboxes[other], outboxes[other])
        for other in others
    }


@dataclass
class _Record:
    """A rank's description: its host, its process, the pipes to which other ranks write.

    A pipe is a descriptor and an inode.
    """

    host: str
    process: int
    pipes: dict[int, tuple[int, int]] = field(default_factory=dict)
    problem: str = ""


def _not_one_host(records: Sequence[_Record], ranks: Sequence[int]) -> str:
    """Why these ranks cannot share memory; empty if they can. The same text on all ranks."""
    for rank, record in zip(ranks, records, strict=True):
        if not record.host:
            return f"rank {rank} has no memory that others can map (memfd, as on Linux)"
        if record.host != records[0].host:
            return f"ranks {ranks[0]} and {rank} are not on one host, as one user, in one container"
    if len({record.process for record in records}) < len(records):
        return "several ranks are threads of one process"
    return ""


def _raise_alike(problems: Sequence[str]) -> None:
    """Raise for the first problem, if there is one; all ranks have the same list."""
    for problem in problems:
        if problem:
            raise SharedMemoryError(
                f"these ranks cannot share memory: {problem}. Use ProcessGroupTransport()."
            )


def _open(process: int, fd: int, inode: int) -> int:
    """The writing end of another process's pipe."""
    mine = os.open(f"/proc/{process}/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if os.fstat(mine).st_ino != inode:
        os.close(mine)
        raise OSError(f"descriptor {fd} of process {process} is not what it said")
    return mine


def _exchange(mine: _T, process_group: dist.ProcessGroup) -> list[_T]:
    """Return the objects of all ranks, in rank order: gathers of the process group itself."""
    everyones = [mine] * process_group.size()
    with torch.inference_mode(False):  # gloo's threads write to the tensors
        dist.all_gather_object(everyones, mine, process_group)
    return everyones

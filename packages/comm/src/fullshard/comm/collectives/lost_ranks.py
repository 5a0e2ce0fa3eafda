"""Waits for collectives, with errors that say where this rank was and which rank was lost."""

from __future__ import annotations

from typing import NoReturn

import torch.distributed as dist

from fullshard.comm.runtime.observer import TIMELINES, marked_wait
from fullshard.comm.runtime.process_watch import ended_ranks
from fullshard.comm.runtime.ranges import NOTHING
from fullshard.comm.transports.config import GatherConfig, ReduceConfig

__all__ = ["PeerLostError", "raise_located", "wait_for"]

_OF_BACKENDS = (RuntimeError, dist.DistBackendError, dist.DistNetworkError)  # and no subclass


class PeerLostError(RuntimeError):
    """A rank ended, failed, or did not come in time, while others wait for it.

    Attributes:
        rank: its rank in the default process group.
        kind: what it did, as a number of the transport that found out.
    """

    def __init__(self, message: str, rank: int, kind: int = 0) -> None:
        """Say so of ``rank``."""
        super().__init__(message)
        self.rank = rank
        self.kind = kind

    def say_where(self, collective: str, name: str) -> None:
        """Let the message say, too, in which collective, and of whose tensors, this rank was."""
        self.args = (f"{self} This rank was in the {collective} of {name or 'tensors'}.",)

    def __reduce__(self) -> tuple[type[PeerLostError], tuple[str, int, int]]:
        """Pickles, for those who send errors between processes."""
        return type(self), (str(self), self.rank, self.kind)


def raise_located(
    error: RuntimeError, collective: str, name: str, process_group: dist.ProcessGroup
) -> NoReturn:
    """Raise ``error``, which ended a collective, or a clearer error in its place.

    The error of a backend reports a broken connection, and no rank.

    Args:
        error: what was raised.
        collective: what this rank was in.
        name: whose tensors.
        process_group: the ranks of the collective.

    Raises:
        PeerLostError: if a rank of this host has ended.
        RuntimeError: otherwise ``error`` itself, with a note if a backend raised it.
    """
    if isinstance(error, PeerLostError):
        error.say_where(collective, name)
        raise error
    if type(error) not in _OF_BACKENDS:
        raise error
    if ended := ended_ranks(process_group):
        several = len(ended) > 1
        who = f"{'ranks' if several else 'rank'} {', '.join(map(str, ended))}"
        lost = PeerLostError(
            f"{who} {'have' if several else 'has'} ended: see the first error of the job.",
            ended[0],
        )
        lost.say_where(collective, name)
        raise lost from error
    error.add_note(
        f"This rank was in the {collective} of {name or 'tensors'}. No other rank of its host is "
        "known to have ended: look for the first error among the ranks of all hosts."
    )
    raise error


def wait_for(config: GatherConfig | ReduceConfig, work: dist.Work) -> None:
    """Return once a collective that was launched is over.

    Raises:
        PeerLostError: if a rank of this host has ended, or a rank that shares memory is late.
        RuntimeError: another error of the backend.
    """
    with marked_wait(config.waits_for, config.name) if TIMELINES else NOTHING:
        try:
            work.wait()
        except RuntimeError as error:
            raise_located(error, config.what, config.name, config.process_group)

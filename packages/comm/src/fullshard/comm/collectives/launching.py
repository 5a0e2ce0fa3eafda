"""Events and waits, for gathers and reductions alike."""

from __future__ import annotations

import torch.distributed as dist

from fullshard.comm.collectives.lost_ranks import raise_located
from fullshard.comm.runtime.observer import TIMELINES, EventKind, Mark, emit, mark
from fullshard.comm.transports.config import GatherConfig, ReduceConfig

__all__ = ["emit_launch", "wait_for"]


def emit_launch(
    config: GatherConfig | ReduceConfig, kind: EventKind, copied: int, nbytes: int
) -> None:
    """Emit the copy event, and the event of the collective if ``nbytes`` is not zero."""
    rank, name = config.process_group.rank(), config.name
    packing, moving = config.runs_on
    emit(EventKind.COPY_IN, name, rank=rank, nbytes=copied, stream=packing)
    if nbytes:
        emit(kind, name, rank=rank, nbytes=nbytes, stream=moving)


def wait_for(config: GatherConfig | ReduceConfig, work: dist.Work) -> None:
    """Return once a collective that was launched is over.

    Raises:
        PeerLostError: if a rank of this host has ended, or a rank that shares memory is late.
        RuntimeError: another error of the backend.
    """
    if TIMELINES:
        mark(config.waits_for, config.name)
    try:
        work.wait()
    except RuntimeError as error:
        raise_located(error, config.what, config.name, config.process_group)
    finally:
        if TIMELINES:
            mark(Mark.WAIT_ENDED)

"""The process group that connects trainer ranks with the consumers of an engine.

Owns how both meet without a common ``init_process_group``, and messages of that group. In it,
trainer ranks come first, in their order; consumers follow.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fullshard.sharding.spi import require_count

__all__ = ["LinkError", "connect_engine", "receive", "receive_number", "send", "send_number"]


class LinkError(RuntimeError):
    """Raised where a consumer or a trainer rank was lost, stopped, or could not send."""


def connect_engine(
    host: str,
    port: int,
    *,
    rank: int,
    size: int,
    timeout: float = 3600.0,
    is_server: bool | None = None,
) -> dist.ProcessGroup:
    """Return a process group over gloo of trainer ranks and consumers, once all are there.

    The process group is not registered with ``torch.distributed``: the default process groups of
    both sides do not change. The caller must keep a reference to the process group.

    Args:
        host: the address of the first trainer rank, as all others reach it.
        port: on which it listens.
        rank: of this process: trainer ranks from 0 on, in order, then consumers.
        size: how many processes there are in all.
        timeout: seconds that a process waits for all to come, and for each message after that. A
            process that is lost is noticed at once.
        is_server: whether this process listens; None: the one with rank 0.

    Raises:
        ValueError: if ``rank`` is not below ``size``.
        torch.distributed.DistError: if the others do not come in time.
    """
    require_count("size", size)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < size:
        raise ValueError(f"rank is {rank!r}; pass a number from 0 to {size - 1}")
    patience = timedelta(seconds=timeout)
    listens = rank == 0 if is_server is None else is_server
    store = dist.TCPStore(host, port, is_master=listens, timeout=patience, wait_for_workers=False)
    place = dist.PrefixStore("fullshard engine", store)
    made: Any = dist.ProcessGroupGloo(place, rank, size, patience)
    link: dist.ProcessGroup = made  # a backend, which has the same messages
    link.barrier().wait()  # gloo alone returns when this process is connected
    return link


def send(link: dist.ProcessGroup, message: torch.Tensor, to: int, tag: int) -> None:
    """Send a message on the CPU, and return once it is on its way."""
    link.send([message], to, tag).wait()


def receive(link: dist.ProcessGroup, message: torch.Tensor, source: int, tag: int) -> None:
    """Fill ``message`` with the next one from ``source``."""
    link.recv([message], source, tag).wait()


def send_number(link: dist.ProcessGroup, number: int, to: int, tag: int) -> None:
    """Send a number."""
    send(link, torch.tensor([number]), to, tag)


def receive_number(link: dist.ProcessGroup, source: int, tag: int) -> int:
    """Return the next number from ``source``."""
    number = torch.zeros(1, dtype=torch.int64)
    receive(link, number, source, tag)
    return int(number)

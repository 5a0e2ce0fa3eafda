"""All-to-all: each rank sends every other one a part of its own.

[Note: order of messages] Gloo sends a message once its receiver has asked for it, and a rank asks
on the connection that carries what it sends itself. Gloo's own all-to-all, and its all-gather of
two ranks, send first: then the rank that is asked sooner fills the connection. Its own request
waits behind all its data, and only one direction is in use at a time. In ``exchange`` every rank
asks for its own before it sends any. For 6.3 MB each way over 1 Gbit/s gloo's all-gather took 58 to
80 ms, its all-to-all 76 to 104, this order 53 to 57, and the wire alone takes 50 (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist

from fullshard.comm.runtime import compat
from fullshard.comm.runtime.devices import traits_of
from fullshard.comm.runtime.works import SeveralWorks, awaited

__all__ = ["all_to_all", "exchange", "is_served"]

_TAG = 1 << 30  # gloo hands on messages of one tag in order; users count theirs from 0
_CPU = torch.device("cpu")


def is_served(device: torch.device, process_group: dist.ProcessGroup) -> bool:
    """Whether ranks can exchange tensors on ``device`` so: gloo's messages are of host memory."""
    return not traits_of(device).queued and compat.backend_names(process_group, _CPU) == ("gloo",)


def exchange(
    sent: Sequence[torch.Tensor],
    arriving: Sequence[torch.Tensor],
    process_group: dist.ProcessGroup,
    async_op: bool,
) -> dist.Work | None:
    """In ``arriving[r]`` what rank ``r`` has in its ``sent`` for this rank.

    ``arriving`` and ``sent`` hold a contiguous tensor per rank, with as many bytes as that rank has
    for this one. This rank's own is copied, unless it is the same memory. A collective call: all
    ranks call it in the same order.
    """
    rank, size = process_group.rank(), process_group.size()
    if arriving[rank].data_ptr() != sent[rank].data_ptr():
        arriving[rank].copy_(sent[rank])
    after = [(rank + step) % size for step in range(1, size)]  # so not all send to the same one
    asked = [(peer, arriving[peer].view(torch.uint8)) for peer in reversed(after)]
    given = [(peer, sent[peer].view(torch.uint8)) for peer in after]
    works = [process_group.recv([each], peer, _TAG) for peer, each in asked if each.numel()]
    works += [process_group.send([each], peer, _TAG) for peer, each in given if each.numel()]
    return awaited(SeveralWorks(works), async_op)


def all_to_all(
    output: torch.Tensor, input: torch.Tensor, process_group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """Part ``r`` of each rank's ``input`` in rank ``r``'s ``output``; all parts are equal."""
    if is_served(input.device, process_group):
        size = process_group.size()
        return exchange(input.chunk(size), output.chunk(size), process_group, async_op)
    work = dist.all_to_all_single(
        output.view(torch.uint8),  # as bytes: backends know fewer dtypes
        input.view(torch.uint8),
        group=process_group,
        async_op=async_op,
    )
    return cast("dist.Work | None", work)

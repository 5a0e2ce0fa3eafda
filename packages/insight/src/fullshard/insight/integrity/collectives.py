"""Collectives that compare what arrived with what was sent, by checksums.

Owns an all-gather and a reduce-scatter for ``set_custom_all_gather`` and
``set_custom_reduce_scatter``. The calls are synchronous. The reduce-scatter sends each rank its
parts, adds them in rank order, and repeats the addition. Findings are recorded. The step continues
with the values as they arrived, and ends before the optimizer changes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
import torch.distributed as dist

from fullshard.comm import (
    AllGather,
    CachingAllocator,
    Layout,
    ProcessGroupTransport,
    ReduceOp,
    ReduceScatter,
)
from fullshard.comm.spi import all_to_all, host_carrier_of, op_name
from fullshard.insight.integrity.checksums import checksums
from fullshard.insight.integrity.findings import Finding, Findings
from fullshard.sharding.spi import device_type_of

__all__ = ["CheckedAllGather", "CheckedReduceScatter", "Parts", "exchanged"]


class Parts:
    """The parts of a rank's slice of a buffer, one per tensor, and what is left.

    Args:
        names: of the tensors.
        layout: of the buffer.
    """

    def __init__(self, names: Sequence[str], layout: Layout) -> None:
        self.numel = layout.buffer.slice_numel
        itemsize = layout.buffer.dtype.itemsize
        pairs = zip(layout.extents, names, strict=True)
        placed = sorted((extent.offset // itemsize, name) for extent, name in pairs)
        self.names = [name for _, name in placed]
        self._starts = [start for start, _ in placed]
        if layout.mask_numel:
            self.names.append("the used-parameter mask")
            self._starts.append(layout.mask_offset // itemsize)

    def of(self, piece: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of one slice, ``[numel]``."""
        ends = [*self._starts[1:], piece.numel()]
        return [piece[a:b] for a, b in zip(self._starts, ends, strict=True)]


class _Checked:
    """The part that both collectives share: checksums of slices, compared over ranks.

    Args:
        name: of the group.
        parts: return the parts of a slice; called in the first collective, as a group knows the
            full names and the dtypes of its parameters from its first forward on.
        findings: where differences are noted.
    """

    def __init__(self, name: str, parts: Callable[[], Parts], findings: Findings) -> None:
        self._name = name
        self._parts = parts
        self._findings = findings
        self._allocator = CachingAllocator()

    @cached_property
    def known(self) -> Parts:
        """The parts of a slice."""
        return self._parts()

    def _known_for(self, numel: int) -> Parts | None:
        return self.known if self.known.numel == numel else None

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a tensor from torch's caching allocator."""
        return self._allocator.empty(size, dtype=dtype, device=device)

    def _sums(self, piece: torch.Tensor) -> torch.Tensor:
        known = self._known_for(piece.numel())
        return checksums([piece] if known is None else known.of(piece))

    def _compare(
        self, stage: str, sent: torch.Tensor, piece: torch.Tensor, sender: int, receiver: int
    ) -> None:
        """Compare checksums ``sent`` by a rank with those of the ``piece`` that arrived."""
        what = f"what rank {receiver} has is not what rank {sender} sent"
        if stage == "sum":
            what = "a second addition gave other bits"
        self._findings.comparisons += 1
        different = (self._sums(piece) != sent).any(1).nonzero().flatten().tolist()
        known = self._known_for(piece.numel())
        for index in different:
            tensor = self._name if known is None else known.names[index]
            self._findings.add(
                Finding(
                    stage=stage,
                    ranks=tuple(dict.fromkeys((sender, receiver))),
                    tensor=tensor,
                    what=what,
                )
            )


def exchanged(sums: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Return the checksums of every rank, on the CPU, in rank order; ``sums`` are on the CPU."""
    carrier = host_carrier_of(group, torch.device(device_type_of(group)))
    own = sums.to(carrier or "cpu")
    everyone = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(everyone, own, group=group)
    return [each.cpu() for each in everyone]


class CheckedAllGather(_Checked, AllGather):
    """An all-gather whose result is compared with what each rank sent."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Gather, and compare; done on return."""
        own = input_tensor.clone()
        sent = exchanged(self._sums(own), group)
        self._gather(output_tensor, own, group)
        receiver = dist.get_rank()
        pieces = output_tensor.view(group.size(), -1)
        for at, piece in enumerate(pieces):
            self._compare("gather", sent[at], piece, dist.get_global_rank(group, at), receiver)

    def _gather(self, output: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> None:
        ProcessGroupTransport().all_gather(output, own, group, False)


class CheckedReduceScatter(_Checked, ReduceScatter):
    """A reduce-scatter whose parts are compared with what each rank sent, and added twice."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> None:
        """Reduce, and compare; done on return.

        Raises:
            ValueError: if ``op`` is neither a sum nor an average.
        """
        if op_name(op) not in ("sum", "avg"):
            raise ValueError(f"got the reduction {op_name(op)}; checks know sums and averages")
        ranks, own = group.size(), group.rank()
        sums = torch.stack([self._sums(piece) for piece in input_tensor.view(ranks, -1)])
        self._note(sums)
        sent = [each[own] for each in exchanged(sums, group)]
        arrived = torch.empty_like(input_tensor)
        self._exchange(arrived, input_tensor, group)
        pieces = list(arrived.view(ranks, -1))
        receiver = dist.get_rank()
        for at, piece in enumerate(pieces):
            sender = dist.get_global_rank(group, at)
            self._compare("reduction", sent[at], piece, sender, receiver)
        averages = op_name(op) == "avg"
        self._add(pieces, output_tensor, averages)
        again = torch.empty_like(output_tensor)
        _added(pieces, again, averages)
        self._compare("sum", self._sums(again), output_tensor, receiver, receiver)

    def _note(self, sums: torch.Tensor) -> None:
        """Note the checksums of this rank's gradients, ``[ranks, tensors, 2]``."""
        names = self.known.names
        if len(names) != sums.size(1):
            names = [self._name] * sums.size(1)
        self._findings.reduced += zip(names, sums.unbind(1), strict=True)

    def _exchange(
        self, arrived: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup
    ) -> None:
        all_to_all(arrived, sent, group, False)

    def _add(self, pieces: Sequence[torch.Tensor], output: torch.Tensor, averages: bool) -> None:
        _added(pieces, output, averages)


@torch.no_grad()
def _added(pieces: Sequence[torch.Tensor], output: torch.Tensor, averages: bool) -> None:
    """Fill ``output`` with the sum of ``pieces`` in their order, or the average."""
    output.copy_(pieces[0])
    for piece in pieces[1:]:
        output.add_(piece)
    if averages:
        output.div_(len(pieces))

"""Collectives in which hosts talk once: what leaves a host was summed there, what comes is shared.

Owns the two phases of each collective and their order. A *reduction* first sums inside the host, in
shared memory. A rank sums the parts for its place on any host; then ranks of one place exchange
these sums and add them in the order of hosts. A *gather* first exchanges shards between ranks of
one place, then shares the result inside the host. Over ``H`` hosts a reduction of ``N`` bytes lets
``N * (H - 1) / H`` leave each host, as does a gather; of all parts for all others it would be the
number of its ranks times that. MPI libraries use such two-level algorithms; each place of a host
talks, so that no rank carries all.

[Note: order of addition] ``(a + b) + (c + d)`` for two hosts of two ranks, each sum in rank order;
bf16 and fp16 are added in fp32 and rounded at the end of each level. The order depends only on the
levels. Ranks without levels add ``((a + b) + c) + d``.

Refuses: choosing levels (see ``hosts``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from fullshard.comm import (
    AllGather,
    DefaultAllGather,
    GatherBuffer,
    ReduceOp,
    Transport,
    default_all_gather,
)
from fullshard.comm.spi import (
    SeveralWorks,
    all_to_all,
    check_reduction,
    default_transport,
    exchange,
    is_served,
    reduce_in_rank_order,
    traits_of,
)
from fullshard.wire.hosts import Grid, Hosts, Level, Levels, given_grid, levels_of

__all__ = ["HostsTransport", "Parts", "gather_by_hosts"]


class Parts(Protocol):
    """The wire form of the sums of a host, and their addition."""

    def narrowed(
        self, sums: torch.Tensor, ranks: Sequence[int], level: Level, rank: int
    ) -> torch.Tensor:
        """Return what travels, ``[hosts * m]``, in memory of ``level``.

        Args:
            sums: ``[hosts, n]``, a row for each of ``ranks``.
            ranks: the receivers, one on each host.
            level: where memory comes from.
            rank: this one.
        """

    def add(self, arrived: Sequence[torch.Tensor], output: torch.Tensor, op: ReduceOp) -> None:
        """Fill ``output``, ``[n]``, with what came, ``[m]`` from each host, in their order."""


@dataclass(frozen=True, slots=True)
class HostsTransport(Transport):
    """Sums inside hosts before anything leaves them, and shares there what arrives.

    The default transport is used where all ranks are on one host, or each is on its own.

    Attributes:
        hosts: ranks of each host, consecutive in the world, or "names": by the hosts' names.
        parts: what travels between hosts in a reduction; None: sums as they are.
    """

    hosts: Hosts
    parts: Parts | None = None

    def all_gather(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        process_group: dist.ProcessGroup,
        async_op: bool,
    ) -> dist.Work | None:
        """Fill ``output`` (``[world * n]``) with every rank's ``input`` (``[n]``), in rank order.

        Raises:
            ValueError: as ``levels_of``, or if the sizes do not fit.
            PeerLostError: if a rank of this host has ended.
        """
        levels = levels_of(process_group, self.hosts)
        if levels is None:
            transport = default_transport(process_group)
            return transport.all_gather(output, input, process_group, async_op)
        _check_sizes(output, input, process_group)
        if input.numel() == 0:
            return None
        gather = _Gather(levels, output, input)
        if not is_served(input.device, levels.gathers.between):
            gather.on_stream()
            return None
        return _ended(
            levels.gathers.turns.launch(partial(gather.share, gather.exchange())), async_op
        )

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        process_group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool,
    ) -> dist.Work | None:
        """Fill ``output`` (``[n]``) with this rank's part of the reduced ``input``.

        ``input`` is ``[world * n]``. See [Note: order of addition].

        Raises:
            ValueError: as ``levels_of``; if the sizes do not fit, ``op`` is not defined for the
                dtype, or is no sum, average, maximum, minimum or product.
            PeerLostError: if a rank of this host has ended.
        """
        levels = levels_of(process_group, self.hosts)
        if levels is None:
            transport = default_transport(process_group)
            return transport.reduce_scatter(output, input, process_group, op, async_op)
        check_reduction(op, input.dtype)
        _check_sizes(input, output, process_group)
        if input.numel() == 0:
            return None
        reduction = _Reduction(levels, output, input, op, self.parts)
        if not is_served(input.device, levels.reductions.between):
            reduction.on_stream()
            return None
        return _ended(levels.reductions.turns.launch(reduction.run), async_op)

    def open_shared_buffer(
        self, process_group: dist.ProcessGroup, nbytes: int
    ) -> GatherBuffer | None:
        """Return memory that all ranks map, if they are on one host. A collective call."""
        if levels_of(process_group, self.hosts) is not None:
            return None
        return default_transport(process_group).open_shared_buffer(process_group, nbytes)


def gather_by_hosts(hosts: Hosts, process_group: dist.ProcessGroup) -> AllGather:
    """Return what gathers among the ranks of a process group; it communicates nothing.

    Raises:
        ValueError: if levels are given, and hosts have different numbers of its ranks.
    """
    alone = process_group.size() == 1
    if alone or (hosts != "names" and given_grid(process_group, hosts) is None):
        return default_all_gather(process_group)
    return DefaultAllGather(transport=HostsTransport(hosts))


def _check_sizes(whole: torch.Tensor, part: torch.Tensor, process_group: dist.ProcessGroup) -> None:
    if whole.numel() != process_group.size() * part.numel():
        raise ValueError(
            f"got tensors of {whole.numel()} and {part.numel()} elements for "
            f"{process_group.size()} ranks; the first must be the second times the ranks"
        )


def _ended(work: dist.Work, async_op: bool) -> dist.Work | None:
    if async_op:
        return work
    work.wait()
    return None


class _Gather:
    """One gather.

    Attributes:
        host_major: what it fills, host by host: the output, or memory that is copied there.
    """

    def __init__(self, levels: Levels, output: torch.Tensor, input: torch.Tensor) -> None:
        self._grid, self._level = levels.grid, levels.gathers
        self._host = levels.grid.host(levels.rank)
        self._place = levels.grid.place(levels.rank)
        self._output, self._input = output, input
        self.host_major = output
        if not levels.grid.is_in_order:
            self.host_major = self._level.take(output.numel(), output.dtype, output.device)

    def _of_host(self, host: int) -> torch.Tensor:
        """Return the slices of a host's ranks, ``[per_host * n]``."""
        numel = self._grid.per_host * self._input.numel()
        return self.host_major.narrow(0, host * numel, numel)

    def _of_place(self, host: int) -> torch.Tensor:
        numel = self._input.numel()
        return self._of_host(host).narrow(0, self._place * numel, numel)

    def exchange(self) -> dist.Work:
        """Return the messages between ranks of this place, in flight."""
        hosts = self._grid.hosts
        arriving = [self._of_place(host) for host in range(hosts)]
        work = exchange([self._input] * hosts, arriving, self._level.between, True)
        assert work is not None, "it is in flight"
        return work

    def share(self, arriving: dist.Work) -> None:
        """Shares what this host's ranks have, and what came once it has; on a turn."""
        with torch.inference_mode(self._output.is_inference()):
            self._share(self._host)
            arriving.wait()
            for host in range(self._grid.hosts):
                if host != self._host:
                    self._share(host)
            self._land()

    def _share(self, host: int) -> None:
        own = self._of_place(host)
        inside = self._level.inside
        default_transport(inside).all_gather(self._of_host(host), own, inside, False)

    def _land(self) -> None:
        if self.host_major is not self._output:
            _rows(self._output, self._grid)[list(self._grid.order)] = _rows(
                self.host_major, self._grid
            )
            self._level.release(self.host_major)

    def on_stream(self) -> None:
        """Run all steps in order on the current stream."""
        level, numel = self._level, self._input.numel()
        column = self._input.new_empty(self._grid.hosts * numel)
        default_transport(level.between).all_gather(column, self._input, level.between, False)
        inside = default_transport(level.inside)
        for host, shard in enumerate(column.split(numel)):
            inside.all_gather(self._of_host(host), shard, level.inside, False)
        self._land()


class _Reduction:
    """One reduction."""

    def __init__(
        self,
        levels: Levels,
        output: torch.Tensor,
        input: torch.Tensor,
        op: ReduceOp,
        parts: Parts | None,
    ) -> None:
        self._grid, self._level, self._rank = levels.grid, levels.reductions, levels.rank
        self._output, self._input, self._op, self._parts = output, input, op, parts

    def run(self) -> dist.Work:
        """Sums inside the host, on a turn; returns what follows, in flight."""
        with torch.inference_mode(self._output.is_inference()):
            sums, level = self._summed(True), self._level
            sent = self._sent(sums)
            arrived = level.take(sent.numel(), sent.dtype, sent.device)
            work = all_to_all(arrived, sent, level.between, True)
        assert work is not None, "it is in flight"

        def finish() -> None:
            with torch.no_grad(), torch.inference_mode(self._output.is_inference()):
                self._add(arrived)
            for memory in (arrived, sent, *(() if sent is sums else (sums,))):
                level.release(memory)

        return SeveralWorks((work,), finish)

    def on_stream(self) -> None:
        """Run all steps in order on the current stream."""
        level, sums = self._level, self._summed(False)
        if self._parts is None and traits_of(sums.device).queued:  # the backend's own is fastest
            between = default_transport(level.between)
            between.reduce_scatter(self._output, sums, level.between, self._op, False)
            return
        sent = self._sent(sums)
        arrived = torch.empty_like(sent)
        all_to_all(arrived, sent, level.between, False)
        self._add(arrived)

    def _summed(self, async_op: bool) -> torch.Tensor:
        """Return the sums of this host for the ranks of this place, ``[hosts * n]``."""
        grid, level, given = self._grid, self._level, self._input
        numel = self._output.numel()
        if not grid.is_in_order:
            given = _rows(given, grid)[list(grid.order)].view(-1)
        size = grid.hosts * numel
        # Memory of a stream's own allocator, which knows when it is free.
        sums = level.take(size, given.dtype, given.device) if async_op else given.new_empty(size)
        inside = default_transport(level.inside)
        works = [
            inside.reduce_scatter(total, parts, level.inside, self._op, async_op)
            for total, parts in zip(sums.split(numel), given.chunk(grid.hosts), strict=True)
        ]
        SeveralWorks([work for work in works if work is not None]).wait()
        return sums

    def _sent(self, sums: torch.Tensor) -> torch.Tensor:
        if self._parts is None:
            return sums
        ranks = self._grid.between(self._grid.place(self._rank))
        rows = sums.view(self._grid.hosts, -1)
        return self._parts.narrowed(rows, ranks, self._level, self._rank)

    def _add(self, arrived: torch.Tensor) -> None:
        by_host = arrived.view(self._grid.hosts, -1).unbind()
        if self._parts is None:
            reduce_in_rank_order(by_host, self._output.view(-1), self._op)
        else:
            self._parts.add(by_host, self._output, self._op)


def _rows(tensor: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return a row for each rank."""
    return tensor.view(len(grid.order), -1)

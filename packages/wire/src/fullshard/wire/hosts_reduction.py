"""Reductions in which sums of a host travel in forms of their own: exact inside, narrow between.

Owns what of a host's sums travels: the parts for one rank on each host (cast or as codes) and the
used-parameter mask. ``WidenedReducePlan`` provides their positions, and ``HostsTransport`` uses the
result. Refuses: moving anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch

from fullshard.comm import DefaultReduceScatter, Layout, ReduceConfig, ReduceOp, TensorSpec
from fullshard.comm.spi import ReducePlan, foreach_copy, own_mask, shard_views
from fullshard.wire.hosts import Hosts, Level
from fullshard.wire.hosts_transport import HostsTransport
from fullshard.wire.reduction import WidenedReducePlan

__all__ = ["plan_by_hosts"]


def plan_by_hosts(
    layout: Layout, forms: Sequence[TensorSpec], config: ReduceConfig, hosts: Hosts
) -> ReducePlan:
    """Return what reduces gradients of ``layout``, first inside hosts, then in ``forms`` between.

    Args:
        layout: of the result, as for ``foreach_reduce``.
        forms: per tensor of it what travels between hosts; its own specs: sums as they are.
        config: ranks, streams, scaling; the collective is the default one.
        hosts: see ``HostsTransport``.

    Raises:
        ValueError: as ``WidenedReducePlan``.
    """
    exact = tuple(forms) == layout.specs
    transport = HostsTransport(hosts, None if exact else _Narrow(layout, forms, config))
    allocator = cast("DefaultReduceScatter", config.comm).allocator
    comm = DefaultReduceScatter(transport=transport, allocator=allocator)
    return ReducePlan(layout, replace(config, comm=comm))


class _Narrow(WidenedReducePlan):
    """The ``Parts`` of a transport: sums of a host in forms of their own."""

    def narrowed(
        self, sums: torch.Tensor, ranks: Sequence[int], level: Level, rank: int
    ) -> torch.Tensor:
        """See ``Parts``. Gaps hold anything: nobody reads them."""
        spec = self.sent.buffer
        sent = level.take(len(ranks) * spec.slice_numel, spec.dtype, sums.device)
        keys = {place: form.keys(rank) for place, form in self._coded.items()}
        targets, sources = [], []
        for row, target, holder in zip(sums, sent.view(len(ranks), -1), ranks, strict=True):
            shards = shard_views(row, self.layout, holder)
            if self.layout.mask_numel:
                shards.append(own_mask(row, self.layout).unsqueeze(0))
            places = shard_views(target, self.sent, holder)
            for place, (shard, lies) in enumerate(zip(shards, places, strict=True)):
                if not shard.numel():
                    continue
                if place in self._coded:
                    self._coded[place].encode(shard.unsqueeze(0), lies, holder, keys[place])
                else:
                    targets.append(lies)
                    sources.append(shard)
        foreach_copy(targets, sources)
        return sent

    def add(self, arrived: Sequence[torch.Tensor], output: torch.Tensor, op: ReduceOp) -> None:
        """See ``Parts``: widened, in the order of hosts; ``op`` is the configuration's."""
        self._add(arrived, output)

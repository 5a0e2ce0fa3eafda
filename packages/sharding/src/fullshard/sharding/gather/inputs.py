"""Shards on their way into a gather of one group or several: brought to the device, and checked.

Owns what a gather sends: the same again while the shards live where they are sent from. Where they
live elsewhere, each gather has copies of its own, made on the stream that reads them. Refuses to
know where shards live: the policy moves, one shard at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch

from fullshard.comm import GatherConfig, Layout
from fullshard.comm.spi import OwnShards, as_arrived
from fullshard.sharding.base.compat import local_shard_getter
from fullshard.sharding.base.memory import addresses_of
from fullshard.sharding.base.policies import declares
from fullshard.sharding.params.param import FSDPParam
from fullshard.sharding.params.param_sharding import ParamSharding

__all__ = ["GatherInputs"]

_stored = local_shard_getter("sharded")


class GatherInputs:
    """The inputs of gathers of the same parameters.

    Attributes:
        params: the parameters.
        layout: of a gather of all.
        as_stored: whether gathers send the shards themselves, not copies.
        may_coalesce: whether one gather may send these and the shards of other groups.
    """

    may_coalesce = True

    def __init__(
        self, params: Sequence[FSDPParam], layout: Layout, shardings: Sequence[ParamSharding] = ()
    ) -> None:
        """Take the parameters in the order of ``layout``.

        ``shardings``: what makes a stored shard travel; empty: the parameters' own.
        """
        self.params = tuple(params)
        self.layout = layout
        self._shardings = tuple(shardings) or tuple([param.sharding for param in params])
        self.as_stored = all(declares(each.offload, "stages_in_nothing") for each in params)
        self._shards: list[torch.Tensor] = []
        self._addresses: list[int] = []  # of those
        self._sent: OwnShards | None = None  # made of those

    def sends(self, config: GatherConfig) -> OwnShards:
        """Return what a gather sends: one object as long as gathers send the shards themselves."""
        shards = list(map(_stored, self.params))
        sent, addresses = self._sent, addresses_of(shards)
        same = addresses == self._addresses and all(map(is_, shards, self._shards))
        if sent is None or not same:
            pairs = zip(self._shardings, self.staged(config), strict=True)
            travel = [sharding.to_travel(each) for sharding, each in pairs]
            sent = OwnShards(travel, self.layout, config)
            if self.as_stored:
                self._shards, self._addresses, self._sent = shards, addresses, sent
        return sent

    def forget_copies(self) -> None:
        """Make the next gather start from the stored shards, as it does here."""

    def arrived(self, param: FSDPParam) -> torch.Tensor:
        """Return the stored shard of ``param`` with the values that a gather delivers."""
        return as_arrived(param.shard, param.sent, param.mesh_info.shard_rank)

    def staged(self, config: GatherConfig) -> Sequence[torch.Tensor]:
        """Return each parameter's shard on the device, as the copy-in stream sees it.

        Copies are made on that stream, which alone reads them.
        """
        shards = list(map(_stored, self.params))
        if self.as_stored:
            return shards
        with config.streams.use(config.streams.copy_in):
            pairs = zip(self.params, shards, strict=True)
            return [param.offload.stage_in(shard, config.device) for param, shard in pairs]

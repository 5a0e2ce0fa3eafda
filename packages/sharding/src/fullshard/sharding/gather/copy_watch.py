"""Finds copies of shards that are stale, and changes that would be lost, in debug mode.

Checksums of the source shards tell that a copy is stale. Versions and addresses of full parameters
tell that a user changed them while no module used them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.comm.spi import is_debugging
from fullshard.sharding.base.compat import current_graph_task, version_of
from fullshard.sharding.base.forward_pass import ParameterGeneration
from fullshard.sharding.base.memory import addresses_of
from fullshard.sharding.params.param import FSDPParam

__all__ = ["CopyWatch"]

_CHUNK = 1 << 20  # elements that are widened to 64 bits at once


class CopyWatch:
    """The checksums of one group's shards when they were last gathered.

    Attributes:
        sums: the checksums; empty outside debug mode.
    """

    def __init__(self, generation: ParameterGeneration) -> None:
        """Start without a known copy."""
        self._generation = generation
        self.sums: list[torch.Tensor] = []
        self._copied_of = -1
        self._idle: list[tuple[int, int]] = []

    def copied(self, params: Sequence[FSDPParam], *, kept: bool) -> None:
        """Note the shards of ``params`` that are about to be gathered.

        Args:
            params: whose shards.
            kept: the gather reads copies made earlier.
        """
        self._idle = []
        if kept:
            self.reused(params)
            return
        self.sums = [_checksum(param.shard) for param in params] if is_debugging() else []
        self._copied_of = self._generation.number

    def reused(self, params: Sequence[FSDPParam]) -> None:
        """Check that the shards of ``params`` are unchanged since the copy that is used again.

        Not in a backward, for which the copy of its forward is right.

        Raises:
            RuntimeError: naming the parameters that changed.
        """
        is_known_stale = self._copied_of != self._generation.number
        if is_known_stale or not self.sums or not is_debugging() or current_graph_task() != -1:
            return
        changed = [
            param.name
            for param, then in zip(params, self.sums, strict=True)
            if not torch.equal(_checksum(param.shard), then)
        ]
        if changed:
            raise RuntimeError(
                f"{', '.join(changed)} changed while a gathered copy was kept, and not by an "
                "optimizer's step or a state dict, so the copy is stale; call parameters_changed() "
                "on the sharded module after changing parameters, on every rank"
            )

    def note_idle(self, params: Sequence[FSDPParam]) -> None:
        """Note the full parameters of ``params``, which nobody is to change from now on."""
        self._idle = _marks(params) if is_debugging() else []

    def written(self, params: Sequence[FSDPParam]) -> list[str]:
        """End that; return the names of those that changed, and do not alias their shards."""
        idle, self._idle = self._idle, []
        if not idle:
            return []
        shards = addresses_of([param.shard for param in params])
        return [
            param.name
            for param, before, now, shard in zip(params, idle, _marks(params), shards, strict=True)
            if now != before and now[1] != shard
        ]


def _marks(params: Sequence[FSDPParam]) -> list[tuple[int, int]]:
    """Return the version and the address of each full parameter."""
    full = [param.unsharded for param in params]
    return list(zip(map(version_of, full), addresses_of(full), strict=True))


@torch.no_grad()
def _checksum(shard: torch.Tensor) -> torch.Tensor:
    """Return two numbers that change with nearly any change of bits: ``[2]``, int64.

    The sum of all words, and the sum of each times its position: Fletcher's checksum, modulo 2**64.
    """
    flat = shard.detach().contiguous().reshape(-1).view(torch.uint8)
    words = flat.view(torch.int32) if flat.numel() % 4 == 0 else flat
    sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start + 1, start + 1 + chunk.numel(), device=flat.device)
        sums += torch.stack([chunk.sum(), (chunk * place).sum()])
    return sums

"""Finds copies of shards that are stale, in debug mode: by checksums of what they were made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fullshard.comm.debug.debug import is_debugging
from fullshard.sharding.base.compat import current_graph_task
from fullshard.sharding.base.forward_pass import ParameterGeneration
from fullshard.sharding.params.param import FSDPParam

__all__ = ["CopyWatch"]

_CHUNK = 1 << 20  # elements that are widened to 64 bits at once


class CopyWatch:
    """The checksums of one group's shards when they were last copied, by a gather or to a device.

    Attributes:
        sums: the checksums; empty outside debug mode.
    """

    def __init__(self, generation: ParameterGeneration) -> None:
        """Knows of no copy."""
        self._generation = generation
        self.sums: list[torch.Tensor] = []
        self._copied_of = -1

    def copied(
        self,
        params: Sequence[FSDPParam],
        reused: Callable[[], Sequence[bool]],
    ) -> None:
        """Notes the shards of ``params`` that are about to be gathered.

        Args:
            params: whose shards.
            reused: tells for which of them the gather reads a copy made earlier.
        """
        kept = reused() if self.sums else [False] * len(params)
        self._compare(params, kept)
        if is_debugging():
            self.sums = [
                self.sums[index] if keeps else _checksum(param.shard)
                for index, (param, keeps) in enumerate(zip(params, kept, strict=True))
            ]
        elif not all(kept):
            self.sums = []
        self._copied_of = self._generation.number

    def reused(self, params: Sequence[FSDPParam]) -> None:
        """Returns if the shards of ``params`` are what a copy that is to serve again was made of.

        Not in a backward, for which the copy of its forward is right.

        Raises:
            RuntimeError: naming the parameters that changed.
        """
        if self._copied_of == self._generation.number:  # else known to be stale
            self._compare(params, [True] * len(params))

    def _compare(self, params: Sequence[FSDPParam], kept: Sequence[bool]) -> None:
        """Does what ``reused`` says, for those of ``params`` whose copy is ``kept``."""
        if not self.sums or not is_debugging() or current_graph_task() != -1:
            return
        changed = [
            param.name
            for param, then, keeps in zip(params, self.sums, kept, strict=True)
            if keeps and not torch.equal(_checksum(param.shard), then)
        ]
        if changed:
            raise RuntimeError(
                f"{', '.join(changed)} changed while an unsharded, staged or cast copy was kept, "
                "and not by an optimizer's step or a state dict, so the copy is stale; call "
                "parameters_changed() on the sharded module after changing parameters, on every "
                "rank"
            )


@torch.no_grad()
def _checksum(shard: torch.Tensor) -> torch.Tensor:
    """Returns two numbers that change with nearly any change of bits: ``[2]``, int64.

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

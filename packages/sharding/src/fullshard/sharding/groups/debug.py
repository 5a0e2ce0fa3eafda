"""Debug mode for sharded models: collectives that ranks disagree on, and stale unsharded copies.

Owns what a sharded model tells ``fullshard.comm``'s debug mode (that its forward raised, that it
was reset), and the checksums by which it finds parameters that changed while a copy of them was
kept. It refuses to compare ranks: ``fullshard.comm`` does, and a stale copy is a rank's own affair.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from fullshard.comm import (
    debug_collectives,
    is_debugging,
    leave_collectives,
    resume_collectives,
    set_debug_collectives,
)
from fullshard.sharding.base.compat import current_graph_task
from fullshard.sharding.base.generation import ParameterGeneration
from fullshard.sharding.params.param import FSDPParam

__all__ = ["CopyWatch", "after_forward", "after_reset", "debug_mode", "set_debug_mode"]

_CHUNK = 1 << 20  # elements that are widened to 64 bits at once
_TIMEOUT = 120.0


@contextmanager
def debug_mode(*, timeout: float = _TIMEOUT) -> Iterator[None]:
    """A context in which ranks that do different things raise, instead of waiting for ever.

    Before each gather, reduction and all-reduce the ranks compare what they are about to launch:
    which, of whose parameters, how many bytes, in which dtype. Where they differ, or a rank does
    not come, every rank raises ``fullshard.comm.CollectiveMismatchError`` with one report, such as
    "rank 3 gathers layers.17, rank 1 reduces layers.18", and nothing is launched, so that after
    ``reset_iter_state()`` on every rank the program can go on. A rank whose forward raises, or that
    leaves the context by an exception, is part of the others' report at once.

    Also, an unsharded copy that serves a second forward is compared with its shards, by checksum: a
    ``RuntimeError`` names parameters that were changed without ``parameters_changed()``.

    Results stay the same to the last bit. Enter it on every rank at the same place of the program;
    contexts nest, and the innermost timeout counts.

    Args:
        timeout: seconds that ranks wait for the last to come; below the process group's own, above
            what a slow rank needs between two collectives (to compile, or to save a checkpoint).

    Raises:
        TypeError: if ``timeout`` is no number.
        ValueError: if it is not above 0 and finite.
        RuntimeError: if ``torch.distributed`` is not initialised.
    """
    with debug_collectives(timeout=timeout):
        yield


def set_debug_mode(enabled: bool, *, timeout: float = _TIMEOUT) -> None:
    """Turns debug mode on or off until further notice, for this rank; as ``debug_mode``.

    Call it on every rank at the same place of the program. An exception outside a forward that ends
    one rank's program is found by the others after the timeout: inside ``with debug_mode():`` they
    are told.

    Raises:
        TypeError: if ``enabled`` is no bool or ``timeout`` no number.
        ValueError: if ``timeout`` is not above 0 and finite.
        RuntimeError: if ``torch.distributed`` is not initialised.
    """
    set_debug_collectives(enabled, timeout=timeout)


# -- what a model tells ---------------------------------------------------------------------------


def after_forward(*, raised: bool) -> None:
    """Tells the other ranks if an outermost forward ended by an exception."""
    error = sys.exc_info()[1] if raised else None
    if error is not None:
        leave_collectives(error)


def after_reset(*, in_backward: bool) -> None:
    """Lets a model go on that was reset; ``in_backward``: in the middle of a backward, so tell."""
    if in_backward:
        leave_collectives(sys.exc_info()[1])
    else:
        resume_collectives()


# -- stale copies ---------------------------------------------------------------------------------


class CopyWatch:
    """The checksums of one group's shards when they were last copied, by a gather or a staging."""

    def __init__(self, generation: ParameterGeneration) -> None:
        """Knows of no copy."""
        self._generation = generation
        self._sums: list[torch.Tensor] = []
        self._copied_of = -1

    def copied(
        self,
        params: Sequence[FSDPParam],
        serving: Callable[[Sequence[FSDPParam]], Sequence[bool]],
    ) -> None:
        """Notes the shards of ``params`` that are about to be gathered.

        Args:
            params: whose shards.
            serving: tells for which of them the gather reads a copy made earlier; see ``reused``.
        """
        if not self._sums and not is_debugging():
            return
        kept = serving(params) if self._sums else [False] * len(params)
        self._compare(params, kept)
        if is_debugging():
            before: list[torch.Tensor | None] = [*self._sums] or [None] * len(params)
            self._sums = [
                then if keeps and then is not None else _checksum(param.shard)
                for param, then, keeps in zip(params, before, kept, strict=True)
            ]
        elif not all(kept):
            self._sums = []
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
        if not self._sums or not is_debugging() or current_graph_task() != -1:
            return
        changed = [
            param.name
            for param, then, keeps in zip(params, self._sums, kept, strict=True)
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

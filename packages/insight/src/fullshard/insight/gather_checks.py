"""Checks around gathers in debug mode: copies that are stale, lost changes, and late reads.

Checksums of the source shards tell that a copy is stale. Versions and addresses of full parameters
tell that a user changed them while no module used them. Hooks on the tensors that autograd saves
tell that backward reads a parameter whose group is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import cast

import torch

from fullshard.insight.debugging import is_debugging
from fullshard.insight.saved_reads import watch_reads
from fullshard.sharding import (
    ExtendedGroup,
    ExtendedParameter,
    FSDPParam,
    FSDPParamGroup,
    GroupExtension,
    ShardedState,
)
from fullshard.sharding.spi import (
    addresses_of,
    current_graph_task,
    set_data,
    version_of,
)

__all__ = ["GatherChecks", "ParametersChangedError"]

_CHUNK = 1 << 20  # elements that are widened to 64 bits at once


class ParametersChangedError(RuntimeError, AssertionError):
    """A user's change of full parameters that the next reshard would lose.

    The class is also an ``AssertionError``, since torch's FSDP1 raises that.
    """


class GatherChecks(GroupExtension):
    """The checks of one group, which do nothing while debug mode is off."""

    def __init__(self, group: ExtendedGroup) -> None:
        """Start without a known copy."""
        super().__init__(group)
        self._sums: list[torch.Tensor] = []  # of the shards when they were last gathered
        self._copied_of = -1
        self._idle: list[tuple[int, int, torch.Tensor]] = []

    def before_gather(self, *, from_copies: bool) -> None:
        """Note the shards; of copies that an earlier gather kept, check that they are not stale.

        Raises:
            RuntimeError: if they are, naming the parameters.
        """
        self._idle = []
        if from_copies:
            self._require_same_shards()
            return
        params = self.group.params
        self._sums = [_checksum(param.shard) for param in params] if is_debugging() else []
        self._copied_of = self.group.generation.number

    def on_reuse(self) -> None:
        """Check the full parameters and the shards.

        Raises:
            RuntimeError: if either changed, naming the parameters.
        """
        self._require_unwritten()
        self._require_same_shards()

    def on_idle(self) -> None:
        """Note the full parameters: a later change of them is an error."""
        self._idle = [_mark(param) for param in self.group.params] if is_debugging() else []

    def before_reshard(self) -> None:
        """Check the full parameters.

        Raises:
            RuntimeError: if they changed, naming them.
        """
        self._require_unwritten()

    def around_forward(
        self,
        name: str,
        groups: Sequence[ExtendedGroup],
        begin_backward: Callable[[], object] | None,
    ) -> AbstractContextManager[object] | None:
        """Watch the reads of the parameters that autograd saves, of all groups at once."""
        if is_debugging() and begin_backward is not None and groups[0] is self.group:
            engines = cast(Sequence[FSDPParamGroup], groups)
            return watch_reads(engines, partial(_require_full, name))
        return None

    def _require_unwritten(self) -> None:
        """Raise for a change since ``on_idle()``, which parameters that alias shards may have."""
        idle, self._idle = self._idle, []
        changed = []
        for param, (version, address, memory) in zip(self.group.params, idle, strict=False):
            now = _mark(param)
            if now[:2] != (version, address) and now[1:2] != tuple(addresses_of([param.shard])):
                changed.append(param.name)
                set_data(param.unsharded, memory)
        if changed:
            raise ParametersChangedError(
                f"{', '.join(changed)} changed while full: the shards do not have the change, "
                "which would be lost. Forwards may leave parameters full: call reshard() of the "
                "sharded module before you change them, or change them inside "
                "`with fullshard.sharding.unsharded(module, writeback=True):`"
            )

    def _require_same_shards(self) -> None:
        """Raise if shards changed since the copy that is used again.

        Not in a backward, for which the copy of its forward is right.
        """
        is_known_stale = self._copied_of != self.group.generation.number
        if is_known_stale or not self._sums or not is_debugging() or current_graph_task() != -1:
            return
        changed = [
            param.name
            for param, then in zip(self.group.params, self._sums, strict=True)
            if not torch.equal(_checksum(param.shard), then)
        ]
        if changed:
            raise RuntimeError(
                f"{', '.join(changed)} changed while a gathered copy was kept, and not by an "
                "optimizer's step or a state dict, so the copy is stale; call parameters_changed() "
                "on the sharded module after changing parameters, on every rank"
            )


def _require_full(module: str, param: FSDPParam) -> None:
    """Raise if backward, which entered ``module``, reads ``param`` while its group is sharded."""
    group = cast(FSDPParamGroup, param.group)
    if group.state is not ShardedState.UNSHARDED and not group.gathering.setup.keeps_storage:
        raise RuntimeError(
            f"backward reads {param.name}, which is sharded: backward entered module {module!r} "
            "through a tensor that its forward did not return. Return that tensor from forward, "
            "or call fullshard.insight.set_gather_on_read(module, True), or keep the parameters "
            "with set_reshard_after_forward(False)"
        )


def _mark(param: ExtendedParameter) -> tuple[int, int, torch.Tensor]:
    """Return the version and the address of a full parameter, and its memory."""
    full = param.unsharded
    return version_of(full), addresses_of([full])[0], full.detach()


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

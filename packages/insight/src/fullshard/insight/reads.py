"""Gathers a group in backward when autograd first reads one of its parameters.

Owns ``set_gather_on_read``, for losses on tensors that a forward did not return. The function
extends the groups of a module; ``saved_reads`` notices the reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import cast

from torch import nn

from fullshard.insight.saved_reads import watch_reads
from fullshard.sharding import ExtendedGroup, FSDPParamGroup, GroupExtension
from fullshard.sharding.spi import groups_of, require_bool, the_states

__all__ = ["set_gather_on_read"]


def set_gather_on_read(module: nn.Module, gather_on_read: bool, *, recurse: bool = True) -> None:
    """Let backward enter a module through any tensor, not only through what forward returned.

    For losses on tensors that a module keeps or that a forward hook stores: perceptual losses,
    distillation, probes. Backward then gathers a group when autograd first reads one of its
    parameters. Without it such a backward raises torch's "modified by an inplace operation ... is
    at version 1000000000", and in debug mode an error that names the parameter. Each tensor that
    autograd saves costs two calls of Python. Regions with other hooks on saved tensors
    (checkpointing, ``save_on_cpu``) keep those.

    Args:
        module: a sharded module, or with ``recurse`` one that has such modules below.
        gather_on_read: whether a read of a saved parameter gathers its group.
        recurse: set it for all sharded modules below, too.

    Raises:
        TypeError: if an argument is not a bool.
        ValueError: if no module is sharded.
    """
    require_bool("gather_on_read", gather_on_read)
    require_bool("recurse", recurse)
    if not the_states(module, recurse):
        raise ValueError(f"the {type(module).__name__} is not sharded; call fully_shard first")
    for group in groups_of(module, recurse):
        found = _of(group)
        if found is None:
            group.extend(found := _GathersOnRead(group))
        found.is_on = gather_on_read


class _GathersOnRead(GroupExtension):
    """Begins the backward of a module when its parameters are read.

    Attributes:
        is_on: whether it does so.
    """

    is_on = False

    def around_forward(
        self,
        name: str,
        groups: Sequence[ExtendedGroup],
        begin_backward: Callable[[], object] | None,
    ) -> AbstractContextManager[object] | None:
        """Watch the reads of the parameters of all groups, by the first that asks for it."""
        if begin_backward is None or not self.is_on:
            return None
        engines = cast(Sequence[FSDPParamGroup], groups)
        asking = (found for group in engines if (found := _of(group)) is not None and found.is_on)
        if next(asking) is not self:
            return None
        return watch_reads(engines, lambda param: begin_backward())


def _of(group: FSDPParamGroup) -> _GathersOnRead | None:
    return next((each for each in group.extensions if isinstance(each, _GathersOnRead)), None)

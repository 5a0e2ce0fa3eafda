"""Notices when backward reads a parameter that autograd saved.

``watch_reads`` wraps all tensors that autograd saves during one forward of a sharded module.
Backward asks for each saved tensor, for a loss on any tensor. ``fullshard.sharding`` decides when
autograd refuses such a read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from fullshard.insight.compat import may_hook_saved_tensors
from fullshard.sharding import FSDPParam, FSDPParamGroup, ShardedState
from fullshard.sharding.spi import storage_of, untraced, version_of

__all__ = ["watch_reads"]


def watch_reads(
    groups: Iterable[FSDPParamGroup], on_read: Callable[[FSDPParam], object]
) -> AbstractContextManager[object] | None:
    """Return a context in which the tensors that autograd saves are watched.

    Hooks of checkpointing or of a user stay in charge; then nothing is watched: None.

    Args:
        groups: the groups of the module whose forward begins, unsharded now.
        on_read: called when backward reads a parameter, before it gets the values.
    """
    return _SavedReads(groups, on_read) if may_hook_saved_tensors(_SavedReads) else None


class _Saved(NamedTuple):
    """A tensor that autograd saved.

    Attributes:
        tensor: the tensor.
        version: its version when it was saved.
        param: the parameter of which it is an alias, if any.
    """

    tensor: torch.Tensor
    version: int
    param: FSDPParam | None


class _SavedReads(torch.autograd.graph.saved_tensors_hooks):
    """The hooks of one forward on the tensors that autograd saves."""

    def __init__(
        self, groups: Iterable[FSDPParamGroup], on_read: Callable[[FSDPParam], object]
    ) -> None:
        self._on_read = on_read
        self._params: dict[int, list[FSDPParam]] = {}  # by storage
        for group in groups:
            for param in group.params if group.state is ShardedState.UNSHARDED else ():
                self._params.setdefault(storage_of(param.unsharded), []).append(param)
        super().__init__(self._pack, self._unpack)

    @untraced
    def _pack(self, tensor: torch.Tensor) -> _Saved:
        params = self._params.get(storage_of(tensor), ())
        first = _first_byte(tensor)
        before = [param for param in params if _first_byte(param.unsharded) <= first]
        owner = max(before, key=lambda param: _first_byte(param.unsharded), default=None)
        return _Saved(tensor, version_of(tensor), owner)

    @untraced
    def _unpack(self, saved: _Saved) -> torch.Tensor:
        if saved.param is not None:
            self._on_read(saved.param)
        version = version_of(saved.tensor)
        if version != saved.version:  # torch leaves this check to hooks
            raise RuntimeError(
                f"a tensor of shape {tuple(saved.tensor.shape)} that backward needs was changed in "
                f"place: it is at version {version}, and was saved at version {saved.version}; "
                "clone the tensor before the change"
            )
        return saved.tensor


def _first_byte(tensor: torch.Tensor) -> int:
    """Return where a tensor begins in its storage, in bytes."""
    return int(tensor.storage_offset()) * tensor.itemsize

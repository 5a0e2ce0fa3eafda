"""Notices when backward reads a parameter that autograd saved.

``watch_reads`` wraps all tensors that autograd saves during one forward of a sharded module.
Backward asks for each saved tensor, for a loss on any tensor. See [Note: reads] in ``base.compat``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import NamedTuple, cast

import torch

from fullshard.sharding.base.compat import storage_of, version_of
from fullshard.sharding.base.states import ShardedState
from fullshard.sharding.groups.param_group import FSDPParamGroup
from fullshard.sharding.hooks.compat import may_hook_saved_tensors
from fullshard.sharding.params.param import FSDPParam

__all__ = ["watch_reads"]


def watch_reads(
    label: str, groups: Iterable[FSDPParamGroup], on_read: Callable[[], object] | None
) -> ExitStack:
    """Watch the tensors that autograd saves until the returned stack is closed.

    Hooks of checkpointing or of a user stay in charge; then nothing is watched.

    Args:
        label: the name of the module whose forward begins.
        groups: the groups of the module, unsharded now.
        on_read: called when backward reads a parameter, before it gets the values; None: raise a
            ``RuntimeError`` if the group is sharded then.
    """
    stack = ExitStack()
    if may_hook_saved_tensors(_SavedReads):
        stack.enter_context(_SavedReads(label, groups, on_read))
    return stack


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
        self, label: str, groups: Iterable[FSDPParamGroup], on_read: Callable[[], object] | None
    ) -> None:
        self._label = label
        self._on_read = on_read
        self._params: dict[int, list[FSDPParam]] = {}  # by storage
        for group in groups:
            for param in group.params if group.state is ShardedState.UNSHARDED else ():
                self._params.setdefault(storage_of(param.unsharded), []).append(param)
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        params = self._params.get(storage_of(tensor), ())
        first = _first_byte(tensor)
        before = [param for param in params if _first_byte(param.unsharded) <= first]
        owner = max(before, key=lambda param: _first_byte(param.unsharded), default=None)
        return _Saved(tensor, version_of(tensor), owner)

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        if saved.param is not None:
            self._read(saved.param)
        version = version_of(saved.tensor)
        if version != saved.version:  # torch leaves this check to hooks
            raise RuntimeError(
                f"a tensor of shape {tuple(saved.tensor.shape)} that backward needs was changed in "
                f"place: it is at version {version}, and was saved at version {saved.version}; "
                "clone the tensor before the change"
            )
        return saved.tensor

    def _read(self, param: FSDPParam) -> None:
        """Gather for a read of ``param``, or raise if its group is sharded."""
        if self._on_read is not None:
            self._on_read()
            return
        group = cast(FSDPParamGroup, param.group)
        if group.state is not ShardedState.UNSHARDED and not group.gathering.keeps_storage:
            raise RuntimeError(
                f"backward reads {param.name}, which is sharded: backward entered module "
                f"{self._label!r} through a tensor that its forward did not return. Return that "
                "tensor from forward, or call set_gather_on_read(True) on the sharded module, or "
                "keep the parameters with set_reshard_after_forward(False)"
            )


def _first_byte(tensor: torch.Tensor) -> int:
    """Return where a tensor begins in its storage, in bytes."""
    return int(tensor.storage_offset()) * tensor.itemsize

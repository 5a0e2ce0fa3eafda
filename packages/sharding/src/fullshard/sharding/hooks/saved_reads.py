"""Notices when backward reads a parameter that autograd saved.

``SavedReads`` wraps what autograd saves during one forward of a sharded module. Backward asks for
each saved tensor, whichever tensor the loss was made of. See [Note: reads] in ``base.compat``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from fullshard.sharding.base.compat import may_hook_saved_tensors, storage_of, version_of
from fullshard.sharding.base.states import ShardedState
from fullshard.sharding.groups.param_group import FSDPParamGroup
from fullshard.sharding.params.param import FSDPParam

__all__ = ["SavedReads"]


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


class SavedReads(torch.autograd.graph.saved_tensors_hooks):
    """A context for one forward: tells when backward reads a parameter of ``groups``."""

    def __init__(
        self, groups: Iterable[FSDPParamGroup], on_read: Callable[[FSDPParam], object]
    ) -> None:
        """Watch the parameters that are unsharded now.

        Args:
            groups: the groups whose parameters are watched.
            on_read: called when backward reads a parameter, before it gets the values.
        """
        self._params: dict[int, list[FSDPParam]] = {}  # by storage
        for group in groups:
            for param in group.params if group.state is ShardedState.UNSHARDED else ():
                self._params.setdefault(storage_of(param.unsharded), []).append(param)
        self._on_read = on_read
        super().__init__(self._pack, self._unpack)

    @classmethod
    def allowed(cls) -> bool:
        """Return whether no other hooks on saved tensors are in the way: see ``compat``."""
        return may_hook_saved_tensors(cls)

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        params = self._params.get(storage_of(tensor), ())
        first = _first_byte(tensor)
        before = [param for param in params if _first_byte(param.unsharded) <= first]
        owner = max(before, key=lambda param: _first_byte(param.unsharded), default=None)
        return _Saved(tensor, version_of(tensor), owner)

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

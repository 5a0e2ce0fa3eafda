"""Keeps the full gradients of backwards that do not communicate, until one that does.

Owns when a group communicates at all, the sums so far, and what becomes of both where a backward
raises. It is told of the ends of backwards as the strategies of [Note: reduce strategies] are, and
comes before them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.sharding.params.param import FSDPParam

__all__ = ["Accumulation"]


class Accumulation:
    """The gradients of a group that no reduction has taken: what autograd left, and sums.

    Attributes:
        enabled: whether backwards reduce (``set_requires_gradient_sync``).
        keeps: whether gradients of backwards that ended well outlive one that raises.
        unsynced: whether such backwards left any.
        kept: by parameter the sum in the reduce dtype, apart from what autograd adds to.
    """

    def __init__(self, params: Sequence[FSDPParam]) -> None:
        """Starts with none."""
        self.enabled = True
        self.keeps = False
        self.unsynced = False
        self.kept: dict[FSDPParam, torch.Tensor] = {}
        self._params = params
        self._saved: dict[FSDPParam, torch.Tensor] = {}  # kept ones that were taken, to put back

    @property
    def waiting(self) -> bool:
        """Whether any gradient is there."""
        left = (p.unsharded.grad for p in self._params if p.unsharded is not p.sharded)
        return bool(self.kept) or any(gradient is not None for gradient in left)

    @property
    def names(self) -> list[str]:
        """The names of the parameters of which there is one."""
        return [each.name for each in self._params if each in self.kept or each.left is not None]

    def stash(self) -> None:
        """Adds up what autograd left, but in a backward that may yet lose it."""
        if not self.keeps:
            self._keep(apart=False)

    def _keep(self, *, apart: bool) -> None:
        """Moves what autograd left into the sums.

        Where autograd's dtype is the reduce dtype, it stays in place, as autograd goes on adding to
        it; unless it is to lie ``apart`` from what autograd adds to.
        """
        for param in self._params:
            left = param.left
            if left is None:
                continue
            if apart or param in self.kept or left.dtype != param.reduce_dtype:
                self.put(param, self.take_of(param))

    def take(self) -> list[torch.Tensor | None]:
        """Returns the gradient of each parameter since the last reduction, and forgets it."""
        if not self.kept:
            return [param.take_gradient() for param in self._params]
        if self.keeps:
            self._saved = {**self.kept, **self._saved}
        return [self.take_of(param) for param in self._params]

    def take_of(self, param: FSDPParam) -> torch.Tensor | None:
        """Returns that of one, as ``FSDPParam.take_gradient`` does."""
        total, gradient = self.kept.pop(param, None), param.take_gradient()
        if total is None:
            return gradient
        if param in self._saved:
            total = total.clone()
        return total if gradient is None else total.add_(gradient)

    def put(self, param: FSDPParam, total: torch.Tensor | None) -> None:
        """Makes ``total``, as ``take_of`` gives it, all that there is of ``param``."""
        param.drop_gradient()
        self.kept.pop(param, None)
        if total is not None:
            self.kept[param] = total.to(param.reduce_dtype)

    def end_of_backward(self, *, waiting: bool) -> None:
        """Takes notice that a backward ended well; ``waiting``: whether it left any."""
        self.unsynced = waiting
        self._saved.clear()
        if self.keeps and waiting:
            self._keep(apart=True)  # from those of backwards to come, which may raise

    def abandon(self, *, keep: bool) -> None:
        """Drops what a backward that did not end left, and the sums if not ``keep``."""
        self.kept = {**self.kept, **self._saved} if keep else {}
        self.unsynced = self.unsynced and keep
        self._saved.clear()
        for param in self._params:
            param.drop_gradient()

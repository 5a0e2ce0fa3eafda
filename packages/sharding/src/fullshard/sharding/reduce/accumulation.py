"""Gradients of a group that wait for a reduction: what autograd left, and sums in the reduce dtype.

Owns these gradients until a reduction takes them, also over a backward that raises. Refuses to know
when a group reduces.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_

import torch
from torch import nn

from fullshard.sharding.base.compat import gradients_of, without_torch_function
from fullshard.sharding.params.param import FSDPParam

__all__ = ["Accumulation"]

_requires_grad = attrgetter("requires_grad")
_NEVER = nn.Parameter(torch.empty(0), requires_grad=False)  # has no gradient


class Accumulation:
    """The gradients of a group that no reduction has taken: what autograd left, and sums.

    Attributes:
        synchronises: whether the user lets backwards reduce (``set_requires_gradient_sync``).
        waits_for_last: whether placements let the present backward leave its gradients here.
        survives_errors: whether gradients of backwards that ended well outlive one that raises.
        unsynced: whether such backwards left any.
        kept: by parameter the sum in the reduce dtype, apart from what autograd adds to.
    """

    def __init__(self, params: Sequence[FSDPParam]) -> None:
        """Start with none."""
        self.synchronises, self.waits_for_last = True, False
        self.survives_errors = False
        self.unsynced = False
        self.kept: dict[FSDPParam, torch.Tensor] = {}
        self._params = params
        self._saved: dict[FSDPParam, torch.Tensor] = {}  # kept ones that were taken, to put back
        self._generation = params[0].generation
        self._replacements = -1
        self._own: list[nn.Parameter] = []
        self._full: list[nn.Parameter] = []
        self._whole = all(param.sharding.travels_whole for param in params)

    def _look(self) -> None:
        """Find sharded and unsharded parameters; one that was never gathered has no gradient."""
        self._replacements = self._generation.replacements
        self._own = [param.sharded for param in self._params]
        both = zip(self._params, self._own, strict=True)
        self._full = [_NEVER if p.unsharded is own else p.unsharded for p, own in both]

    @property
    def reduces(self) -> bool:
        """Whether a backward reduces."""
        return self.synchronises and not self.waits_for_last

    @property
    def waiting(self) -> bool:
        """Whether any gradient is there."""
        if self._replacements != self._generation.replacements:
            self._look()
        return bool(self.kept) or not all(map(is_, gradients_of(self._full), repeat(None)))

    @property
    def names(self) -> list[str]:
        """The names of the parameters of which there is one."""
        return [
            each.name
            for each in self._params
            if each in self.kept or each.autograd_grad is not None
        ]

    def stash(self) -> None:
        """Move autograd's gradients into the sums.

        If autograd's dtype is the reduce dtype, the gradient stays in place, because autograd adds
        further gradients to it; unless it is to outlive a backward that raises.
        """
        for param in self._params:
            left = param.autograd_grad
            if left is None:
                continue
            if self.survives_errors or param in self.kept or left.dtype != param.reduce_dtype:
                self.set_grad(param, self.take_of(param))

    def pop_grads(self) -> tuple[list[torch.Tensor | None], tuple[bool, ...]]:
        """Return and remove the gradient of each parameter since the last reduction.

        Returns:
            The gradients, and of each parameter whether it requires a gradient now.
        """
        if self._replacements != self._generation.replacements:
            self._look()
        with without_torch_function():
            trainable = tuple(map(_requires_grad, self._own))
        if self.kept:
            if self.survives_errors:
                self._saved = {**self.kept, **self._saved}
            return [self.take_of(param) for param in self._params], trainable
        found = gradients_of(self._full)
        with without_torch_function():
            for unsharded in self._full:
                unsharded.grad = None
        dense = torch.strided if self._whole else None
        # looks at no parameter where none has a say: that would cost more than all the rest
        for at, left in enumerate(found):
            if left is not None and (left.layout is not dense or left.requires_grad):
                found[at] = self._params[at].to_reduce(left)
        return found, trainable

    def take_of(self, param: FSDPParam) -> torch.Tensor | None:
        """Return the gradient of a parameter and remove it."""
        total, left = self.kept.pop(param, None), param.autograd_grad
        param.drop_gradient()
        gradient = None if left is None else param.to_reduce(left)
        if total is None:
            return gradient
        if param in self._saved:
            total = total.clone()
        return total if gradient is None else total.add_(gradient)

    def set_grad(self, param: FSDPParam, total: torch.Tensor | None) -> None:
        """Replace the gradient of ``param`` by ``total``, which came from ``take_of``."""
        param.drop_gradient()
        self.kept.pop(param, None)
        if total is not None:
            self.kept[param] = total.to(param.reduce_dtype)

    def end_of_backward(self) -> bool:
        """Note a successful backward, and return whether it left gradients."""
        self.unsynced = self.waiting
        self._saved.clear()
        if self.survives_errors and self.unsynced:
            self.stash()
        return self.unsynced

    def abandon(self, *, keep: bool) -> None:
        """Drop the gradients of an unfinished backward, and the sums if not ``keep``."""
        self.kept = {**self.kept, **self._saved} if keep else {}
        self.unsynced = self.unsynced and keep
        self._saved.clear()
        for param in self._params:
            param.drop_gradient()

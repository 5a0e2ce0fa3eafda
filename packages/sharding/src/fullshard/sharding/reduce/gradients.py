"""The gradients of a group: collected from autograd, accumulated, reduced.

Owns the gradients until a reduction takes them (what autograd left, and sums in the reduce dtype),
whether backwards reduce, and where the group stands in the present backward. ``setups`` makes the
reductions.

[Note: one reduction] A group reduces when no forward of the group is outstanding, which all ranks
know. The layout is always equal, with zeros for a parameter without a gradient on this rank. So
ranks that use different parameters of a group still issue the same collectives. The used-parameter
mask, which marks the parameters that any rank used, is sent with the reduction. A group reduces
once per backward; only reentrant checkpointing, which hides forwards from us until backward reruns
them, can make a group that it reruns twice reduce twice. Gradients of backwards without
communication are accumulated until a backward communicates.

[Note: ways] ``ReductionQueue`` launches what
is ready here.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from operator import attrgetter, is_

import torch
from torch import nn

from fullshard.sharding.base.compat import gradients_of, without_torch_function
from fullshard.sharding.base.states import BackwardStage
from fullshard.sharding.mesh.placements import EarlyReduction
from fullshard.sharding.params.param import FSDPParam
from fullshard.sharding.protocols import WireForms
from fullshard.sharding.reduce.reduction import RootComm
from fullshard.sharding.reduce.setups import ReductionSetups
from fullshard.sharding.reduce.strategies import ReadyReductions

__all__ = ["GroupGradients"]

_UNREDUCED = (BackwardStage.REACHED, BackwardStage.GRADIENT)
_REDUCED = (BackwardStage.REDUCED, BackwardStage.REACHED_AGAIN)
_requires_grad = attrgetter("requires_grad")
_NEVER = nn.Parameter(torch.empty(0), requires_grad=False)  # has no gradient


class GroupGradients:
    """The gradients of one group.

    Attributes:
        params: the group's.
        setups: how they are reduced.
        synchronises: whether the user lets backwards reduce (``set_requires_gradient_sync``).
        waits_for_last: whether placements let the present backward leave its gradients here.
        has_unreduced: whether such backwards left any here.
        reductions: reductions that were ready so far.
        stage: how far the present backward has come.
        in_unsynced_backward: whether a backward without synchronisation reached the group since the
            last reduction; this is equal on all ranks, but the set of gradients may differ.
        early_reduction: what a backward reduces that is not the last of a step.
    """

    def __init__(
        self, params: Sequence[FSDPParam], device: torch.device, shared: RootComm, wire: WireForms
    ) -> None:
        """Start with none."""
        self.params = params
        self.setups = ReductionSetups(params, device, shared, wire)
        self.synchronises, self.waits_for_last = True, False
        self.has_unreduced = False
        self.reductions = 0
        self.stage = BackwardStage.NONE
        self.in_unsynced_backward = False
        self.early_reduction = EarlyReduction.ALL
        # which parameters were trained in backwards that left gradients here; equal on all ranks
        self._trained_before: set[tuple[bool, ...]] = set()
        # by parameter the sum in the reduce dtype, apart from what autograd adds to
        self._sums: dict[FSDPParam, torch.Tensor] = {}
        self._generation = params[0].generation
        self._replacements = -1
        self._sharded: list[nn.Parameter] = []
        self._unsharded: list[nn.Parameter] = []
        self._whole = all(param.sharding.travels_whole for param in params)

    def announce_last(self, is_last: bool) -> None:
        """Note whether the next backward is the last of a step; others reduce less if so asked."""
        waits = EarlyReduction.ALL if is_last else self.early_reduction
        self.waits_for_last = waits is EarlyReduction.NONE
        self.setups.strategy.wait_for_last(waits is EarlyReduction.FIRST)

    @property
    def unsynced(self) -> bool:
        """Whether there are gradients of successful backwards that are not reduced yet."""
        return self.has_unreduced or self.setups.strategy.unsynced

    @property
    def reduces(self) -> bool:
        """Whether a backward reduces."""
        return self.synchronises and not self.waits_for_last

    @property
    def reduced(self) -> bool:
        """Whether the present backward reduced the group."""
        return self.stage in _REDUCED

    def reach(self) -> None:
        """Note that the present backward reached a forward of the group."""
        if self.stage is BackwardStage.NONE:
            self.stage = BackwardStage.REACHED
        elif self.stage is BackwardStage.REDUCED:
            self.stage = BackwardStage.REACHED_AGAIN

    @property
    def synced(self) -> tuple[bool, bool]:
        """Whether a backward reduces now, and whether its reductions give gradients."""
        return self.reduces, self.setups.strategy.gives_gradients

    @contextmanager
    def synced_as(self, synced: tuple[bool, bool]) -> Iterator[None]:
        """Reduce in the block as when ``synced`` was read."""
        strategy = self.setups.strategy
        now = self.synchronises, self.waits_for_last, strategy.gives_gradients
        reduces, strategy.gives_gradients = synced
        self.synchronises, self.waits_for_last = reduces, not reduces
        try:
            yield
        finally:
            self.synchronises, self.waits_for_last, strategy.gives_gradients = now

    def pop_ready(self, *, reduce: bool) -> ReadyReductions:
        """Return the reductions to launch now: none if it is not time, or synchronisation is off.

        There is one per reduce dtype. Gradients that stay
        behind are kept in the reduce dtype. The reductions contain all parameters that require a
        gradient now, or did in a backward whose gradients wait, with or without a gradient on this
        rank: their sizes must not depend on what one rank happened to use.

        Args:
            reduce: whether it is time.
        """
        if not (reduce and self.reduces):
            self._stash()
            return ()
        self.stage = BackwardStage.REDUCED
        self.in_unsynced_backward = False
        gradients, trainable = self._pop_grads()
        if self._trained_before:
            trainable = tuple(map(any, zip(trainable, *self._trained_before, strict=True)))
        ready = self._reductions_of(trainable, gradients)
        if self.setups.strategy.has_second_reduction and self.setups.strategy.owes:
            ready = [*ready, *self._other_partials([setup.params for setup, _ in ready])]
        self.reductions += len(ready)
        return ready

    def _reductions_of(
        self, trainable: tuple[bool, ...], gradients: list[torch.Tensor | None]
    ) -> ReadyReductions:
        """Return the reductions of ``gradients``, one of each parameter of the group."""
        setups = self.setups.of(trainable)
        if len(setups) == 1 and len(setups[0].indices) == len(gradients):
            return ((setups[0], gradients),)  # as most are
        return [(each, [gradients[index] for index in each.indices]) for each in setups]

    def _other_partials(self, reduced: list[tuple[FSDPParam, ...]]) -> ReadyReductions:
        """Return reductions of partial results that none of ``reduced`` fits.

        Parameters were frozen, or trained again, between the backwards of a step.
        """
        others = [params for params in self.setups.strategy.partial_params if params not in reduced]
        masks = [tuple([param in params for param in self.params]) for params in others]
        return [
            each for mask in masks for each in self._reductions_of(mask, [None] * len(self.params))
        ]

    def end_backward(self, *, left: bool) -> str:
        """Note that a backward ended well, and that its reductions, if any, are launched.

        Args:
            left: ``finalize_backward`` is to reduce the group. It also raises the error of a
                gradient that arrived after the reduction of the group.

        Returns:
            An error message if a parameter received a gradient after its group was reduced, or an
            empty string. The other groups end first, as on ranks without an error.
        """
        stage, waiting, late = self.stage, self.waiting, ""
        if stage is BackwardStage.REDUCED and waiting:
            if left:
                return ""
            late = self._note_late()
        self.has_unreduced = waiting
        if self.reduced:
            self._trained_before.clear()
        elif not self.reduces or (left and stage in _UNREDUCED):  # also if only others used it
            self._trained_before.add(self._trainable())
        self.in_unsynced_backward |= stage in _UNREDUCED
        self.in_unsynced_backward |= left and stage is BackwardStage.REACHED_AGAIN
        if self.setups.strategy.has_second_reduction:
            self.setups.strategy.end_backward()
        keeps = left and stage is BackwardStage.GRADIENT  # the end by hand has yet to see it
        self.stage = stage if keeps else BackwardStage.NONE
        return late

    def _note_late(self) -> str:
        """Keep gradients that came after the reduction, and return an error that names them."""
        late = [p.name for p in self.params if p in self._sums or p.autograd_grad is not None]
        self._stash()
        return (
            f"{', '.join(late)} received a gradient after parameter group {self.setups.name!r} had "
            "been reduced, so the sharded gradient lacks it; give the module's inputs a path to "
            "every output that is used, or shard the part that has none by itself; under "
            "torch.autocast, which caches casts of parameters, use one region per call, or "
            "cache_enabled=False"
        )

    def abandon(self) -> bool:
        """Drop the gradients of an unfinished backward, and those of earlier ones without sync.

        Returns:
            Whether there were any of earlier ones.
        """
        lost = self.unsynced
        self._sums.clear()
        self._trained_before.clear()
        self.has_unreduced = self.in_unsynced_backward = False
        for param in self.params:
            param.drop_gradient()
        self.setups.strategy.abandon()
        self.stage = BackwardStage.NONE
        return lost

    def forget(self, replaced: Collection[FSDPParam]) -> None:
        """Make the reductions again, for other dtypes or other parameters.

        Gradients stay, as in ``torch.nn.Module.to``, except the gradients of ``replaced``
        parameters. Results of a first reduction are dropped with a warning, because no second
        reduction can add them.
        """
        for param in self.params:
            total = self.take_of(param)
            self.set_grad(param, None if param in replaced else total)
        self.has_unreduced = self.waiting
        if self.setups.strategy.unsynced:
            self.setups.strategy.abandon()
            warnings.warn(
                f"parameters of {self.setups.name!r} were replaced or changed their dtype, so "
                "gradients that were reduced over one axis of the mesh are dropped; do so between "
                "steps",
                RuntimeWarning,
                stacklevel=3,
            )
        self.setups.forget()

    # -- gradients that no reduction has taken ----------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether any gradient is here."""
        if self._replacements != self._generation.replacements:
            self._look()
        return bool(self._sums) or not all(map(is_, gradients_of(self._unsharded), repeat(None)))

    def take_of(self, param: FSDPParam) -> torch.Tensor | None:
        """Return the gradient of a parameter and remove it."""
        total, left = self._sums.pop(param, None), param.autograd_grad
        param.drop_gradient()
        gradient = None if left is None else param.to_reduce(left)
        if total is None:
            return gradient
        return total if gradient is None else total.add_(gradient)

    def set_grad(self, param: FSDPParam, total: torch.Tensor | None) -> None:
        """Replace the gradient of ``param`` by ``total``, which came from ``take_of``."""
        param.drop_gradient()
        self._sums.pop(param, None)
        if total is not None:
            self._sums[param] = total.to(param.reduce_dtype)

    def _pop_grads(self) -> tuple[list[torch.Tensor | None], tuple[bool, ...]]:
        """Return and remove the gradient of each parameter since the last reduction.

        Returns:
            The gradients, and of each parameter whether it requires a gradient now.
        """
        trainable = self._trainable()
        if self._sums:
            return [self.take_of(param) for param in self.params], trainable
        found = gradients_of(self._unsharded)
        with without_torch_function():
            for unsharded in self._unsharded:
                unsharded.grad = None
        dense = torch.strided if self._whole else None
        # looks at no parameter where none has a say: that would cost more than all the rest
        for at, left in enumerate(found):
            if left is not None and (left.layout is not dense or left.requires_grad):
                found[at] = self.params[at].to_reduce(left)
        return found, trainable

    def _trainable(self) -> tuple[bool, ...]:
        """Return of each parameter whether it requires a gradient now."""
        if self._replacements != self._generation.replacements:
            self._look()
        with without_torch_function():
            return tuple(map(_requires_grad, self._sharded))

    def _look(self) -> None:
        """Find sharded and unsharded parameters; one that was never gathered has no gradient."""
        self._replacements = self._generation.replacements
        self._sharded = [param.sharded for param in self.params]
        both = zip(self.params, self._sharded, strict=True)
        self._unsharded = [_NEVER if p.unsharded is own else p.unsharded for p, own in both]

    def _stash(self) -> None:
        """Move autograd's gradients into the sums.

        If autograd's dtype is the reduce dtype, the gradient stays in place, because autograd adds
        further gradients to it.
        """
        for param in self.params:
            left = param.autograd_grad
            if left is None:
                continue
            if param in self._sums or left.dtype != param.reduce_dtype:
                self.set_grad(param, self.take_of(param))

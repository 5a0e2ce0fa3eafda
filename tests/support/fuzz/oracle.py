"""What is right: one process in plain torch.

The unsharded model sees, one after the other, what every rank sees, and gets the mean of the ranks'
gradients, see ``parity_reference``. With mixed precision, a copy in the narrow dtype computes.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from support.fuzz.around import AroundCase, Norm
from support.fuzz.case import FuzzCase, StepCase
from support.fuzz.model import Root, optimizer_of
from support.fuzz.more import Outcome, Program

__all__ = ["Oracle"]

_EPSILON = 1e-6  # of clip_grad_norm_


class Oracle:
    """The unsharded model, its optimizer, and the norm by which the next step is clipped.

    Attributes:
        model: the model.
        optimizer: its optimizer.
        norm: of the last step's gradients, if a step is clipped by that; None: unknown.
        scaler: of its losses.
    """

    def __init__(self, case: FuzzCase, around: AroundCase, program: Program) -> None:
        self._case, self._around, self._program = case, around, program
        self.scaler = program.scaler()
        self.model = Root(case)
        self.optimizer = optimizer_of(self.model, case, around)
        self.norm: torch.Tensor | None = None
        self._narrow: Root | None = None
        if around.mixed:
            self._narrow = copy.deepcopy(self.model).float()

    def clips_as(self, around: AroundCase) -> None:
        """Clip as a sharded run with other features does."""
        self._around = around

    @torch.no_grad()
    def computing(self) -> Root:
        """Return what computes: the model, or a copy in the narrow dtype."""
        narrow = self._narrow
        if narrow is None:
            return self.model
        for copied, param in zip(narrow.parameters(), self.model.parameters(), strict=True):
            copied.copy_(param)
            copied.requires_grad_(param.requires_grad)
        return narrow

    def backward(self, step: int, micro: int) -> list[Outcome]:
        """Add the gradients of a micro-batch, the mean of those of all ranks.

        Returns what the forward of each rank gave.
        """
        ranks = self._case.world_size
        outcomes = []
        for rank in range(ranks):
            found = self._program.outcome(self.computing(), self.scaler, rank, step, micro)
            outcomes.append(found)
            if self._narrow is None:
                self._program.backward(found.loss / ranks, step, micro)
                continue
            self._narrow.zero_grad()
            self._program.backward(found.loss, step, micro)
            for copied, param in zip(
                self._narrow.parameters(), self.model.parameters(), strict=True
            ):
                if copied.grad is not None:
                    gradient = copied.grad.double() / ranks
                    param.grad = gradient if param.grad is None else param.grad + gradient
        return outcomes

    def clip(self, plan: StepCase) -> torch.Tensor | None:
        """Clip as the sharded program does; return the norm, or None if it does not."""
        around = self._around
        if around.norm is Norm.BY_HAND:
            if plan.max_norm is None:
                return None
            return nn.utils.clip_grad_norm_(self.model.parameters(), plan.max_norm)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        total = nn.utils.get_total_norm(gradients)
        by = total
        if around.norm is Norm.PREVIOUS:
            known, self.norm = self.norm, total
            by = total if known is None or not known.isfinite() or known == 0 else known
        scale = (around.max_norm / (by + _EPSILON)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale)
        return total

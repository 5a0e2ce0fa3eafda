"""Data of a run for a closer look at the first difference."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext

import torch

from fullshard.preflight.verification.closer.contributions import Contributions
from fullshard.preflight.verification.comparing.compare import Comparison
from fullshard.preflight.verification.comparing.updates import Updates
from fullshard.preflight.verification.sharded import Sharded
from fullshard.preflight.verification.verdict import Outcome

__all__ = ["Look"]


class Look:
    """No closer look: it keeps nothing and finds nothing.

    Attributes:
        keeps: the parameters of whose gradients the contributions are kept.
        is_closer: whether the tensors that differ are kept.
    """

    keeps: Collection[str] = ()
    is_closer = False

    def begin_step(self, sharded: Sharded) -> None:
        """Take notice of a step; all ranks call it."""

    def forward(self, sharded: Sharded) -> AbstractContextManager[None]:
        """Return a context for the sharded model's forward and backward."""
        return nullcontext()

    def gradient(self, name: str, ours: torch.Tensor | None) -> None:
        """Take notice of a full gradient of the sharded model; all ranks call it."""

    def before_update(self, updates: Callable[[], Updates]) -> None:
        """Take notice of what the optimizer's step begins from; all ranks call it."""

    def conclude(
        self,
        found: Outcome,
        comparison: Comparison,
        contributions: Contributions,
        sharded: Sharded,
    ) -> None:
        """Note causes of the first difference in ``found``; all ranks call it."""

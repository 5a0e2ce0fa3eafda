"""Resharding: what stays unsharded after forward and after backward.

Named answers to sharding's question, for users who prefer a name to a bool.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KeepUnsharded", "ReshardAlways", "ReshardExceptRoot"]


@dataclass(frozen=True, kw_only=True)
class ReshardExceptRoot:
    """Reshard after forward all but the root, whose backward comes at once, as by default."""

    def after_forward(self, is_root: bool) -> bool:
        """Return whether the module is not the root."""
        return not is_root

    def after_backward(self, is_root: bool) -> bool:
        """Return True."""
        return True


@dataclass(frozen=True, kw_only=True)
class ReshardAlways:
    """Reshard after forward, the root too: least memory, one more gather (ZeRO-3)."""

    def after_forward(self, is_root: bool) -> bool:
        """Return True."""
        return True

    def after_backward(self, is_root: bool) -> bool:
        """Return True."""
        return True


@dataclass(frozen=True, kw_only=True)
class KeepUnsharded:
    """Keep full parameters from forward to backward: one gather per step (ZeRO-2).

    Attributes:
        after_backward_too: keep them after backward as well, until the parameters change; for
            gradient accumulation: one gather per optimizer step.
    """

    after_backward_too: bool = False

    def after_forward(self, is_root: bool) -> bool:
        """Return False."""
        return False

    def after_backward(self, is_root: bool) -> bool:
        """Return whether to reshard after backward."""
        return not self.after_backward_too

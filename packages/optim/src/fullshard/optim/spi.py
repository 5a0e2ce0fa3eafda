"""Names of ``fullshard.optim`` for the packages above it. Users import the package itself."""

from __future__ import annotations

from fullshard.optim.newton_schulz import COEFFICIENTS, orthogonalised
from fullshard.optim.preconditioned import new_state, start, update_of

__all__ = [
    "COEFFICIENTS",
    "new_state",
    "orthogonalised",
    "start",
    "update_of",
]

"""The parameter generation: which version of its parameters a group's kept copy was made from.

Owns one counter per group. It moves on when an optimizer that holds a parameter of the group's root
steps, and within a step before each call of its closure; when a state dict is loaded, when full
parameters are written back, and when the user says so with ``parameters_changed()``. Tensor version
counters cannot serve: foreach and fused optimizers do not move them on every build.
"""

from __future__ import annotations

__all__ = ["ParameterGeneration"]


class ParameterGeneration:
    """The version of one group's parameters.

    Attributes:
        number: that of the present generation.
    """

    def __init__(self) -> None:
        """Starts with the first."""
        self.number = 0

    def advance(self) -> None:
        """Declares every copy made so far stale."""
        self.number += 1

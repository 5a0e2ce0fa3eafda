"""The result of a verification: equality, or the first difference and its possible causes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

from fullshard.preflight.verification.tolerance import Tolerance
from fullshard.preflight.wording import listed

__all__ = ["Cause", "Difference", "Outcome", "Phase", "Seen", "Verdict", "VerificationFailed"]


class Phase(StrEnum):
    """The parts of a training step, in the order in which they are compared."""

    BUILD = "build"
    """The parameters, right after sharding."""
    LOSS = "loss"
    """The mean of the ranks' losses."""
    OUTPUT = "output"
    """A layer's output, given the inputs that it saw; layer by layer only."""
    MISSING = "missing gradient"
    """A parameter has a gradient in one of the two runs only."""
    INPUT_GRADIENT = "gradient of an input"
    """What a layer hands back, given the gradients that it saw; layer by layer only."""
    GRADIENT = "gradient"
    """A gradient's values."""
    BUFFER = "buffer"
    """A buffer's values, on any rank."""
    UPDATE = "update"
    """A parameter's values after the optimizer's step."""
    STATE = "optimizer state"
    """What the optimizer keeps of a parameter, after its step."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing compared.

    Attributes:
        phase: when.
        step: in which step, from 0.
        name: the parameter's or buffer's full name, or ``"loss"``; ``"loss 2"`` is the second that
            a step yields.
        module: the full name of the module that holds it, or, of a loss, of the first module whose
            output differs; empty for the root.
        error: the norm of the difference.
        allowed: what rounding alone may make of it.
        scale: the factor by which the sharded value is the reference's, if one fits; else None.
        ranks: ranks whose copy differs from the first rank's copy of the same shard; empty: the
            first rank's differs from the reference.
    """

    phase: Phase
    step: int
    name: str
    module: str = ""
    error: float = 0.0
    allowed: float = 0.0
    scale: float | None = None
    ranks: tuple[int, ...] = ()

    @property
    def excess(self) -> float:
        """The error in units of what is allowed."""
        return self.error / self.allowed if self.allowed > 0 else float(self.error > 0) * 1e300

    def __str__(self) -> str:
        """One line: phase, step, name, and by how much."""
        where = f" in module {self.module!r}" if self.module else ""
        factor = "" if self.scale is None else f"; it is {self.scale:.4g} times the reference's"
        replica = f", on ranks {list(self.ranks)} and the first replica," if self.ranks else ""
        return (
            f"{self.phase} of step {self.step}: {self.name}{where}{replica} differs by "
            f"{self.error:.3g} where rounding allows {self.allowed:.3g}{factor}"
        )


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A possible cause of a difference.

    Attributes:
        name: a few words to recognise it by.
        evidence: what was seen, and what to do.
        tested: whether a run without it was equal, or it was seen to happen; else it only fits.
    """

    name: str
    evidence: str
    tested: bool = True

    def __str__(self) -> str:
        """One line."""
        return f"{self.name} ({'shown' if self.tested else 'fits'}): {self.evidence}"


@dataclass(kw_only=True)
class Seen:
    """Observations of both models, in addition to the compared values.

    Attributes:
        skipped: modules that some ranks ran and others not.
        apart: parameters and buffers that are plain tensors and differ between ranks.
        untied: names of parameters that are separate in one model, and tied in the second.
        otherwise: parameters that require a gradient in one of the models only.
        cast: parameters and buffers that have another dtype when sharded, each with both dtypes.
        modes: modules in train mode in one model, and in eval mode in the other; by name whether it
            is train mode in the sharded model.
        detached: in words, outputs or inputs that require a gradient in the reference only.
        strayed: modules that only one of the models ran on a batch.
        traced: whether it was seen what modules return.
        given: in words, a module that was given something else than in the reference.
        changed: by rank, the settings of modules that the reference has not.
        hooks: in words, the hooks of modules that ``shard`` registered.
        recomputed: modules that returned something else when they ran again in backward.
        passes: how often the sharded model ran in a step.
        parts: whether the runs part in a module; else they do in the loss function.
        fed: whether the sharded model was given other inputs.
        losses: by rank the loss of its batch, of the sharded model and of the reference.
        settings: what the optimizer has for a parameter on some rank, and not in the reference.
        uncovered: parameters that the optimizer of the reference has, and the sharded one has not.
    """

    skipped: tuple[str, ...] = ()
    apart: set[str] = field(default_factory=set)
    untied: tuple[str, ...] = ()
    otherwise: tuple[str, ...] = ()
    cast: dict[str, tuple[torch.dtype, torch.dtype]] = field(default_factory=dict)
    modes: dict[str, bool] = field(default_factory=dict)
    detached: tuple[str, ...] = ()
    strayed: tuple[str, ...] = ()
    traced: bool = False
    given: str = ""
    changed: tuple[dict[tuple[str, str], Any], ...] = ()
    hooks: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    passes: int = 0
    parts: bool = False
    fed: bool = False
    losses: tuple[tuple[float, float], ...] = ()
    settings: tuple[str, ...] = ()
    uncovered: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Outcome:
    """The result of one run of both models.

    Attributes:
        differences: all of the first step that has any, in the order of the phases.
        largest: what came nearest to the tolerance.
        tolerance: what counted as equal.
        device: where the reference trained.
        dtypes: the coarsest dtypes of the reference and of the sharded model.
        seen: observations in addition to the compared values.
        again: of a closer look, whether the difference came again.
        decisive: of a closer look, whether its causes leave no room for others.
        causes: what a closer look found to be behind the first difference.
        known: other findings of the closer look.
        notes: how it was compared, and what was not.
        drew: whether a forward of the sharded model drew random numbers.
        reseeded: whether it seeds the generators of all ranks alike.
    """

    differences: list[Difference] = field(default_factory=list)
    largest: Difference | None = None
    tolerance: Tolerance
    device: str = ""
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32)
    seen: Seen = field(default_factory=Seen)
    again: bool = False
    decisive: bool = False
    causes: list[Cause] = field(default_factory=list)
    known: list[str] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    drew: bool = False
    reseeded: bool = False

    @property
    def first(self) -> Difference | None:
        """The first difference."""
        return self.differences[0] if self.differences else None

    @property
    def reached(self) -> tuple[int, int]:
        """How far both agreed: the step and the phase of the first difference."""
        if self.first is None:
            return 1 << 30, 0
        return self.first.step, list(Phase).index(self.first.phase)


class VerificationFailed(AssertionError):
    """The sharded model does not train as the unsharded one; the message is the verdict."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer of ``verify``, the same on all ranks.

    Attributes:
        equal: whether all compared values agree within rounding.
        steps: how many steps were compared.
        first: the first difference; None if equal.
        others: the names of what differs in the same phase and step.
        largest: the difference that was closest to its limit, or above it.
        causes: what is behind it; if nothing was shown to be, what fits.
        known: other findings of the closer look about the first difference.
        notes: how the comparison was made.
        tolerance: what counted as equal.
    """

    equal: bool
    steps: int
    first: Difference | None
    others: tuple[str, ...]
    largest: Difference | None
    causes: tuple[Cause, ...]
    known: tuple[str, ...]
    notes: tuple[str, ...]
    tolerance: Tolerance

    def require(self) -> None:
        """Return if both agree.

        Raises:
            VerificationFailed: if they do not.
        """
        if not self.equal:
            raise VerificationFailed(str(self))

    def __str__(self) -> str:
        """A paragraph for a person."""
        if self.equal:
            lines = [f"equal over {self.steps} step{'s' * (self.steps > 1)}"]
            if self.largest is None or self.largest.error == 0:
                lines.append("no difference, to the last bit")
            else:
                lines.append(f"largest difference: {self.largest}")
        else:
            lines = [f"not equal: {self.first}"]
            if self.others:
                lines.append(f"also: {listed(self.others, 5)}")
            lines += [f"cause: {cause}" for cause in self.causes] or ["cause: not found"]
            lines += [f"known: {each}" for each in self.known]
        lines += [f"note: {note}" for note in self.notes]
        lines.append(f"tolerance: {self.tolerance}")
        return "\n".join(lines)

"""Whether a contestant trains as the unsharded model does.

Owns the comparison and its tolerance. The reference is the plain model, whose gradients are
averaged over ranks one by one (`fullshard_bench.contestants.plain.build_reference`). Losses are not
enough, since AdamW and clipping hide a gradient of the wrong size: norms are compared, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import DTensor

from fullshard_bench.contestants.training import Outcome, Trainee
from fullshard_bench.launching.ranks import Ranks
from fullshard_bench.measuring.rounds import Batches

__all__ = ["DEFINITION", "Curve", "compare_curves", "compare_last", "curve_of", "train_curve"]

DEFINITION = (
    "losses agree: in the first steps, each the mean over ranks, losses within 1e-3 and gradient"
    " norms within 1e-2 of those of the unsharded model trained on all ranks' batches, relatively"
    " (2e-2 and 1e-1 in bfloat16), and the loss of the last timed step within 5e-2 (2e-1), since"
    " rounding grows as training goes on; the unsharded step shares no gradients, so only its first"
    " loss is compared"
)

_LAST_TOLERANCE = {"float32": 5e-2, "bfloat16": 2e-1}
_TOLERANCES = {"float32": (1e-3, 1e-2), "bfloat16": (2e-2, 1e-1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Losses and gradient norms of steps, each the mean over ranks."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]

    def first(self, steps: int) -> Curve:
        """The curve of the first steps."""
        return Curve(losses=self.losses[:steps], norms=self.norms[:steps])


def _numbers(outcome: Outcome) -> tuple[float, float | None]:
    """Loss and norm as numbers; waits for the device."""
    norm = outcome.norm
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    return float(outcome.loss), None if norm is None else float(norm)


def train_curve(trainee: Trainee, batches: Batches, ranks: Ranks) -> Curve:
    """Train a step on each of `batches`."""
    return curve_of([trainee.step(batch) for batch in batches], ranks)


def curve_of(outcomes: Sequence[Outcome], ranks: Ranks) -> Curve:
    """The curve of these steps; waits for the device."""
    pairs = [_numbers(outcome) for outcome in outcomes]
    norms = [norm for _, norm in pairs if norm is not None]
    return Curve(losses=ranks.mean([loss for loss, _ in pairs]), norms=ranks.mean(norms))


def compare_curves(curve: Curve, reference: Curve, dtype: str, *, shares: bool) -> str:
    """Return the first difference between `curve` and the reference; "" if they agree.

    Args:
        curve: the contestant's.
        reference: the unsharded model's.
        dtype: the dtype of computing.
        shares: whether the contestant's ranks train one model.
    """
    loss_tolerance, norm_tolerance = _TOLERANCES[dtype]
    count = len(reference.losses) if shares else 1
    found = _first_difference(curve.losses[:count], reference.losses[:count], loss_tolerance)
    if found:
        return f"loss {found}"
    if shares and curve.norms and reference.norms:
        found = _first_difference(curve.norms, reference.norms, norm_tolerance)
        if found:
            return f"gradient norm {found}"
    return ""


def compare_last(loss: float, expected: float, dtype: str) -> str:
    """Return how the last loss differs from the reference's; "" if they agree."""
    if math.isclose(loss, expected, rel_tol=_LAST_TOLERANCE[dtype]):
        return ""
    return f"loss {loss:.6g} in the last step, where the unsharded model has {expected:.6g}"


def _first_difference(values: Sequence[float], right: Sequence[float], tolerance: float) -> str:
    for step, (value, expected) in enumerate(zip(values, right, strict=True)):
        if not math.isclose(value, expected, rel_tol=tolerance):
            return f"{value:.6g} in step {step}, where the unsharded model has {expected:.6g}"
    return ""

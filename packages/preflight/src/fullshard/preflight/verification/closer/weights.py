"""Finds of what a sharded gradient is made: the weight of each backward's gradient in the sum.

The contributions that the reference kept are fitted to the sharded gradient by least squares, over
all elements and over the elements of each rank's shard. A fit counts only if it explains the
gradient to within rounding, and if no other fit does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fullshard.preflight.verification.closer.contributions import Contribution
from fullshard.preflight.verification.comparing.compare import Pair
from fullshard.preflight.verification.verdict import Cause

__all__ = ["Weights", "causes_of", "weights_of"]

_NEAR = 0.01
_WORST_CONDITION = 1e4


@dataclass(frozen=True, kw_only=True)
class Weights:
    """With which weight each contribution is in a gradient; 1 is right.

    Attributes:
        name: of the parameter.
        of: the rank and number of each contribution; rank -1 is the gradient of the step before.
        shards: by rank that holds a shard, the weights in that; the key -1 is the whole gradient.
    """

    name: str
    of: tuple[tuple[int, int], ...]
    shards: dict[int, tuple[float, ...]]


def weights_of(
    name: str,
    kept: Sequence[Contribution],
    pair: Pair,
    owners: torch.Tensor,
    before: torch.Tensor | None,
    relative: float,
) -> Weights | None:
    """Return the weights in a gradient; None if none explain it, or several do.

    Args:
        name: of the parameter.
        kept: what the reference's backwards added, which divided by the ranks is its gradient.
        pair: the gradients of both models.
        owners: which rank holds each element.
        before: the gradient of the step before.
        relative: the allowed difference, as part of the norm.
    """
    if not kept:
        return None
    world = 1 + max(each.rank for each in kept)
    columns = [each.gradient.flatten() / world for each in kept]
    of = [(each.rank, each.number) for each in kept]
    theirs = pair.theirs.flatten()
    rest = float((torch.stack(columns).sum(0) - theirs).norm())
    if rest > 4 * relative * sum(float(each.norm()) for each in columns):
        return None  # a hook changes them, or a backward that adds up nothing is among them
    if before is not None:
        columns.append(before.flatten().double())
        of.append((-1, 0))
    made, wanted = torch.stack(columns, 1), pair.ours.flatten()
    whole = _fit(made, wanted, relative)
    if whole is not None:
        return Weights(name=name, of=tuple(of), shards={-1: whole})
    shards = {}
    for rank in owners.unique().tolist():
        own = owners.flatten() == rank
        fit = _fit(made[own], wanted[own], relative)
        if fit is None:
            return None
        shards[rank] = fit
    return Weights(name=name, of=tuple(of), shards=shards)


def _fit(made: torch.Tensor, wanted: torch.Tensor, relative: float) -> tuple[float, ...] | None:
    size = float(made.norm())
    if len(made) < 2 * made.shape[1] or size == 0:
        return None
    scales = made.norm(dim=0)
    if bool((scales <= 1e-6 * size).any()):
        return None
    values = torch.linalg.svdvals(made / scales)
    if float(values[0]) > _WORST_CONDITION * float(values[-1]):
        return None
    found = torch.linalg.lstsq(made, wanted[:, None]).solution[:, 0]
    rest = float((made @ found - wanted).norm())
    bound = 4 * relative * max(size * float(found.abs().max()), float(wanted.norm()))
    return tuple(found.tolist()) if rest <= bound else None


def causes_of(found: Sequence[Weights]) -> list[Cause]:
    """Return what the weights in one or more gradients show."""
    return [cause for cause in map(_cause, found) if cause is not None][:1]


def _cause(found: Weights) -> Cause | None:
    if len(found.shards) > 1:
        return _by_shard(found)
    (weights,) = found.shards.values()
    of = dict(zip(found.of, weights, strict=True))
    before = of.pop((-1, 0), 0.0)
    if _is(before, 0.0):
        return _of_whole(found.name, of)
    if abs(before) > _NEAR and all(_is(weight, 1.0) for weight in of.values()):
        return Cause(
            name="gradients of the step before",
            evidence=f"the gradient of {found.name} is that of this step, and {before:.3g} times "
            "that of the step before: gradients were not set to zero in between",
        )
    return None


def _of_whole(name: str, of: dict[tuple[int, int], float]) -> Cause | None:
    by_weight = {place: round(weight, 2) for place, weight in of.items()}
    missing = [place for place, weight in by_weight.items() if _is(weight, 0.0)]
    rest = {weight for place, weight in by_weight.items() if place not in missing}
    told = f"the gradient of {name} is made of {_told(of)}"
    if missing and len(rest) == 1:
        return Cause(
            name="gradients that are left out",
            evidence=f"{told}: {_places(missing, of)} is not in it. Look at the collective that "
            "reduces it, and at what drops or overwrites gradients between backwards",
        )
    if len(set(by_weight.values())) > 1:
        return Cause(
            name="gradients that do not count alike",
            evidence=f"{told}, where each should be in it once: look at what scales the loss or "
            "the gradients on single ranks or micro-batches, and for a backward or a reduction "
            "that runs again",
        )
    return None  # one factor for all, which another cause names


def _by_shard(found: Weights) -> Cause | None:
    """Return a cause by the contributions to each rank's shard."""
    sources = {}
    for rank, weights in found.shards.items():
        pairs = zip(found.of, weights, strict=True)
        sources[rank] = sorted({place[0] for place, weight in pairs if not _is(weight, 0.0)})
    ranks = sorted({place[0] for place in found.of if place[0] >= 0})
    if all(each == ranks for each in sources.values()):
        return Cause(
            name="gradients that do not count alike",
            evidence=f"the shards of {found.name} are made of the ranks' gradients with weights "
            f"that differ from shard to shard: look at what scales single shards",
        )
    told = "; ".join(
        f"rank {rank}'s shard " + (f"of ranks {each}" if each else "is 0")
        for rank, each in sources.items()
    )
    return Cause(
        name="gradients that are left out",
        evidence=f"the gradient of {found.name} is not made of all ranks' gradients: {told}. "
        "Look at the collective that reduces it, and between which ranks",
    )


def _is(value: float, wanted: float) -> bool:
    return abs(value - wanted) <= _NEAR * max(1.0, abs(wanted))


def _told(of: dict[tuple[int, int], float]) -> str:
    several = len({number for _, number in of}) > 1
    return ", ".join(
        f"{weight:.3g} times rank {rank}'s" + (f" of backward {number + 1}" if several else "")
        for (rank, number), weight in of.items()
    )


def _places(some: list[tuple[int, int]], of: dict[tuple[int, int], float]) -> str:
    """The contributions in words: whole ranks, whole backwards, or one by one."""
    ranks, numbers = ({place[i] for place in some} for i in (0, 1))
    if sorted(some) == sorted(place for place in of if place[0] in ranks):
        return f"what ranks {sorted(ranks)} computed"
    if sorted(some) == sorted(place for place in of if place[1] in numbers):
        last = 1 + max(number for _, number in of)
        return f"what backward {', '.join(str(1 + n) for n in sorted(numbers))} of {last} gave"
    return ", ".join(f"backward {number + 1} of rank {rank}" for rank, number in some)

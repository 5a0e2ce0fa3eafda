"""Looks closer at a first difference while the same program runs again.

Owns what is looked at for which phase: the full parameters that forward and backward see, of which
backwards a gradient is made, how an optimizer's step comes about, and where a tensor differs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from fullshard.preflight.verification.agree import from_first
from fullshard.preflight.verification.closer.contributions import Contribution, Contributions
from fullshard.preflight.verification.closer.gathered import GatherWatch
from fullshard.preflight.verification.closer.look import Look
from fullshard.preflight.verification.closer.steps import StepLook
from fullshard.preflight.verification.closer.weights import causes_of, weights_of
from fullshard.preflight.verification.comparing.compare import Comparison, Pair, scale_of
from fullshard.preflight.verification.comparing.tensors import owners
from fullshard.preflight.verification.comparing.updates import Updates
from fullshard.preflight.verification.program import Program
from fullshard.preflight.verification.sharded import Sharded
from fullshard.preflight.verification.verdict import Cause, Difference, Outcome, Phase

__all__ = ["Closer"]

_MOST = 6
_OF_OPTIMIZER = (Phase.UPDATE, Phase.STATE)
_SPREAD = 0.05
"""What of the most that rounding can make there must be, if everything is rounded."""
_MOST_ELEMENTS = 1 << 24
"""A model of up to that many has all its parameters stepped again, on each rank."""


class Closer(Look):
    """Looks closer at a difference that a run before this one found first.

    Attributes:
        keeps: the parameters of whose gradients the contributions are kept.
        is_closer: True.
    """

    is_closer = True

    def __init__(self, program: Program, found: Outcome, sizes: dict[str, int]) -> None:
        """Prepare for what ``found`` has. ``sizes``: by parameter its number of elements."""
        first = found.first
        assert first is not None, "there is nothing to look at"
        self._program = program
        self._first = first
        names = [each.name for each in found.differences if each.name in sizes]
        others = sorted(dict.fromkeys(names[1:]), key=lambda name: sizes[name])
        self._names = list(dict.fromkeys([*names[:1], *others]))[:_MOST]
        few = sum(sizes.values()) <= _MOST_ELEMENTS
        self._stepped = list(sizes) if few else self._names
        self.keeps: Collection[str] = self._names if first.phase is Phase.GRADIENT else ()
        self._gathered = GatherWatch()
        self._gradients: dict[str, torch.Tensor] = {}
        self._before: dict[str, torch.Tensor] = {}
        self._updates: Updates | None = None
        self._seen: list[Cause] = []

    def begin_step(self, sharded: Sharded) -> None:
        """Note what the shards hold, and the gradients of the step before."""
        self._gathered.begin_step(sharded)
        self._before, self._gradients = self._gradients, {}
        self._updates, self._seen = None, []

    def forward(self, sharded: Sharded) -> AbstractContextManager[None]:
        """Return a context in which full parameters are looked at."""
        if self._program.step is not None:  # it steps optimizers between two forwards
            return nullcontext()
        return self._gathered.watching(sharded)

    def gradient(self, name: str, ours: torch.Tensor | None) -> None:
        """Keep a full gradient."""
        if name in self.keeps and ours is not None and dist.get_rank() == 0:
            self._gradients[name] = ours.to("cpu", torch.float64, copy=True)

    def before_update(self, updates: Callable[[], Updates]) -> None:
        """Keep what the step begins from, and what full parameters were seen; all ranks call it."""
        if self._first.phase in _OF_OPTIMIZER:
            self._updates = updates()
            self._seen = self._gathered.causes(self._updates.sharded)

    def conclude(
        self,
        found: Outcome,
        comparison: Comparison,
        contributions: Contributions,
        sharded: Sharded,
    ) -> None:
        """Note the causes and what else is known of the first difference; all ranks call it."""
        first: Difference | None = from_first(found.first)
        if first is None or _place(first) != _place(self._first):
            return
        found.again = True
        names = from_first([name for name in comparison.pairs if name in sharded.params])
        held = {name: owners(sharded.params[name]) for name in names}
        found.known += _where(first, comparison.pairs, held)
        states = [each.name for each in found.differences if each.phase is Phase.STATE]
        if states and first.phase is Phase.UPDATE:
            found.known.append(f"what the optimizer keeps differs, too: {', '.join(states[:3])}")
        causes = self._seen
        if first.phase is not Phase.BUILD and self._updates is None:
            causes = self._gathered.causes(sharded)
        found.causes += causes
        found.decisive = bool(causes)
        is_uncovered = from_first(bool(found.seen.uncovered))
        if causes or is_uncovered:
            return
        if first.phase is Phase.GRADIENT:
            found.causes += self._causes_of_gradients(held, comparison, contributions, found)
        elif self._updates is not None:
            some = [name for name in self._stepped if name in sharded.params]
            look = StepLook(self._program, sharded, self._updates, some, found.tolerance)
            found.causes += look.causes()

    def _causes_of_gradients(
        self,
        held: dict[str, torch.Tensor],
        comparison: Comparison,
        contributions: Contributions,
        found: Outcome,
    ) -> list[Cause]:
        if dist.get_rank() > 0:
            return []
        relative, weights, causes = found.tolerance.relative, [], []
        for name, pair in comparison.pairs.items():
            if name in held and name not in found.seen.apart:
                kept = contributions.kept.get(name, [])
                cause = _of_places(name, pair, relative) or _of_bits(name, pair, kept, relative)
                causes += [] if cause is None else [cause]
                before = self._before.get(name)
                made = weights_of(name, kept, pair, held[name], before, relative)
                weights += [] if made is None else [made]
        return causes_of(weights) or causes[:1]


def _place(found: Difference) -> tuple[Phase, int, str, str]:
    return found.phase, found.step, found.name, found.module


def _of_places(name: str, pair: Pair, relative: float) -> Cause | None:
    """Whether a gradient has the right values in other places."""
    ours, theirs = (each.flatten().sort().values for each in (pair.ours, pair.theirs))
    if float((ours - theirs).norm()) > relative * float(theirs.norm()):
        return None
    return Cause(
        name="gradients that are in another place",
        evidence=f"the gradient of {name} has the right values, in other places: look at how the "
        "collective that reduces it divides it between ranks",
    )


def _of_bits(name: str, pair: Pair, kept: Sequence[Contribution], relative: float) -> Cause | None:
    """Whether a gradient has numbers of fewer bits, or is the sum of such numbers."""
    terms = torch.zeros_like(pair.theirs)
    for each in kept:
        terms += each.gradient.abs() / (1 + max(other.rank for other in kept))
    error = (pair.ours - pair.theirs).abs()
    for dtype in (torch.bfloat16, torch.float16):
        bound = torch.finfo(dtype).eps * terms
        ours, theirs = ((each.to(dtype).double() == each) for each in (pair.ours, pair.theirs))
        if not bool((error <= 2 * bound).all()):
            continue
        if bool(ours.all()) and not bool(theirs.all()):
            return Cause(
                name="a policy's dtype",
                evidence=f"each element of the gradient of {name} is a {dtype}, and near the "
                "reference's, which has more bits: it is reduced so. Pass stretch= to allow it",
            )
        is_everywhere = float(error.sum()) * len(kept) ** 0.5 > _SPREAD * float(bound.sum())
        if is_everywhere and scale_of(pair.ours, pair.theirs, relative) is None:
            return Cause(
                name="a policy's dtype",
                evidence=f"all over the gradient of {name} elements differ by no more than the "
                f"rounding of what is added up to {dtype}: gradients may travel so. Pass stretch= "
                "to allow it",
                tested=False,
            )
    return None


def _where(first: Difference, pairs: dict[str, Pair], held: dict[str, torch.Tensor]) -> list[str]:
    """In which elements the first tensor differs, and who holds them."""
    pair = pairs.get(first.name)
    if pair is None:
        return []
    error = (pair.ours - pair.theirs).abs()
    bound = first.allowed / max(1.0, error.numel() ** 0.5)
    wrong = error > bound
    known = [f"{int(wrong.sum())} of {error.numel()} elements of {first.name} differ"]
    if first.name in held:
        ranks = held[first.name]
        by_rank = {rank: int(wrong[ranks == rank].sum()) for rank in ranks.unique().tolist()}
        right = [rank for rank, count in by_rank.items() if not count]
        if right and len(right) < len(by_rank):
            wrong_ranks = [rank for rank in by_rank if rank not in right]
            known.append(
                f"they lie in the shards of ranks {wrong_ranks}; those of ranks {right} agree"
            )
    return known

"""Finds out what an optimizer's step did that the reference's did not, by making it again.

From the shards that the step began with it makes steps on full parameters: as they should be,
twice, without the state, on each rank, and on the shards of all ranks in turn. A step with the
result of the sharded run explains the difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fullshard.preflight.verification.agree import Alone, everyones, from_first
from fullshard.preflight.verification.comparing.compare import Comparison, rms
from fullshard.preflight.verification.comparing.optimizers import (
    full_states,
    settings_of,
    states_of,
)
from fullshard.preflight.verification.comparing.tensors import digest, full, local, owners
from fullshard.preflight.verification.comparing.updates import Start, Stepped, Updates
from fullshard.preflight.verification.program import Program
from fullshard.preflight.verification.sharded import Sharded
from fullshard.preflight.verification.tolerance import Tolerance
from fullshard.preflight.verification.verdict import Cause, Phase

__all__ = ["StepLook"]

_PART = 0.02
"""By how much of itself a move may miss a multiple: parameters round it."""


class StepLook:
    """Looks at one step of the optimizer, for some parameters; all ranks call its methods."""

    def __init__(
        self,
        program: Program,
        sharded: Sharded,
        updates: Updates,
        names: Sequence[str],
        tolerance: Tolerance,
    ) -> None:
        """Gather what the step began from and what it made. ``names``: of the parameters."""
        self._program = program
        self._sharded = sharded
        self._updates = updates
        self._tolerance = tolerance
        self._start = updates.start_of(names, everywhere=True)
        self._names = list(self._start.values)
        own = {name: sharded.params[name] for name in self._names}
        self._after = {name: full(param) for name, param in own.items()}
        self._kept: dict[str, dict[str, torch.Tensor]] = {name: {} for name in own}
        for name, key, value in full_states(states_of(sharded.optimizers, own)):
            self._kept[name][key] = value
        self._settings = settings_of(sharded.optimizers, own)
        self._owners = {name: owners(param) for name, param in own.items()}
        self._right = self._stepped(self._start)

    def causes(self) -> list[Cause]:
        """Return what explains the step: the first that does; none if it is as it should be."""
        if not self._names or from_first(self._explains(self._right)):
            return []
        tried = [self._settings_explain, self._twice, self._forgotten]
        if not from_first(self._explains(self._right, states=False)):
            tried += [self._by_rank, self._by_shard, self._by_factor]
        for find in tried:
            found = from_first(find())
            if found is not None:
                return [found]
        return []

    # -- steps made again -------------------------------------------------------------------------

    def _stepped(self, start: Start, **options: Any) -> Stepped | None:
        """Step on these tensors; None if they fail, as those of optimizers that communicate."""
        try:
            with Alone("the optimizer", "It cannot be looked at closer"):
                return Stepped(self._program, start, self._updates.trained, **options)
        except Exception:  # whatever a user's optimizer raises where it is used otherwise
            return None

    def _explains(
        self, made: Stepped | None, *, own: int | None = None, states: bool = True
    ) -> bool:
        """Whether this is what the sharded run has.

        Args:
            made: steps made again.
            own: look at the shards of this rank only.
            states: look at what the optimizer keeps, too.
        """
        if made is None or not made.params:
            return False
        comparison = Comparison(self._tolerance, step=0)
        for name, param in made.params.items():
            held = slice(None) if own is None else (self._owners[name] == own).to(param.device)
            trio = [self._after[name], param.detach(), self._start.values[name]]
            came, wanted, start = (each[held] for each in trio)
            comparison.tensors(Phase.UPDATE, name, came, wanted, start)
            for key, kept in made.states[name].items() if states else ():
                found = self._kept[name].get(key)
                if found is None or found.shape != kept.shape:
                    continue
                part = held if kept.shape == param.shape else ...
                comparison.states(name, key, (found[part], kept[part]), rms([kept]))
        return not comparison.differences

    def _on_ranks(self, made: Stepped | None) -> list[int] | None:
        """The ranks whose shards these steps explain, if the right one explains all others'."""
        rank = dist.get_rank()
        told = everyones((self._explains(made, own=rank), self._explains(self._right, own=rank)))
        if not all(wrong or right for wrong, right in told):
            return None
        return [rank for rank, (wrong, right) in enumerate(told) if wrong and not right] or None

    # -- what may be behind it --------------------------------------------------------------------

    def _settings_explain(self) -> Cause | None:
        """Return a cause if each rank's settings explain its shards."""
        made = self._stepped(self._start, settings=self._settings)
        told = everyones((self._settings, self._explains(made, own=dist.get_rank())))
        theirs = None if self._right is None else self._right.settings
        apart = any(settings != theirs for settings, _ in told)
        if not apart or not all(explained for _, explained in told):
            return None
        return Cause(
            name="optimizer settings that are not the same",
            evidence="a step with each rank's settings makes of the unsharded parameters what the "
            "rank's shards are",
        )

    def _twice(self) -> Cause | None:
        made = self._stepped(self._start, times=2)
        ranks = self._on_ranks(made)
        if ranks is None or made is None or not any(made.states.values()):
            return None  # without a state it is one step with twice the rate
        return Cause(
            name="an optimizer that steps twice",
            evidence="two steps with the same gradients make of the unsharded parameters what "
            f"ranks {ranks} have: look for a second call of step(), or for two optimizers that "
            "have the same parameters",
        )

    def _by_rank(self) -> Cause | None:
        """Return a cause if one step on full parameters differs between ranks."""
        params = {} if self._right is None else self._right.params
        told = everyones({name: digest(param) for name, param in params.items()})
        wrong = [rank for rank, each in enumerate(told) if each != told[0]]
        if not wrong or not all(told):
            return None
        return Cause(
            name="an optimizer that is not the same on all ranks",
            evidence=f"given the same parameters, gradients and state, its step on ranks {wrong} "
            "is not that on rank 0: something in it depends on the rank, or on what the rank has "
            "seen",
        )

    def _by_shard(self) -> Cause | None:
        """Return a cause if steps on each rank's shards, made on rank 0, explain the result."""
        shards = self._updates.shards
        mine = Start(
            {name: local(shards.values[name]).cpu() for name in self._names},
            {name: _cpu(shards.gradients[name]) for name in self._names},
            {name: {k: _cpu(v) for k, v in shards.states[name].items()} for name in self._names},
        )
        starts = everyones(mine)
        after = everyones({name: local(self._sharded.params[name]).cpu() for name in self._names})
        if dist.get_rank() > 0:
            return None
        comparison = Comparison(self._tolerance, step=0)
        for rank, start in enumerate(starts):
            made = self._stepped(
                start.of(name for name in self._names if start.values[name].numel())
            )
            if made is None:
                return None
            for name, param in made.params.items():
                begun = start.values[name]
                comparison.tensors(Phase.UPDATE, name, after[rank][name], param.detach(), begun)
        if comparison.differences:
            return None
        return Cause(
            name="an optimizer that decides by the shard",
            evidence="a step on each rank's shards alone, as if they were whole, makes what the "
            "sharded run has: the optimizer uses norms, shapes or numbers of elements, and sees "
            "those of this rank's shard",
        )

    def _forgotten(self) -> Cause | None:
        if not any(self._start.states.values()):
            return None
        bare = Start(self._start.values, self._start.gradients, {})
        ranks = self._on_ranks(self._stepped(bare))
        if ranks is None:
            return None
        return Cause(
            name="optimizer state that is lost",
            evidence=f"a step without any state makes what ranks {ranks} have: the state of the "
            "steps before is gone, as when the optimizer is made again or its parameters are "
            "replaced",
        )

    def _by_factor(self) -> Cause | None:
        """Whether parameters move as they should times a factor, or by a part of themselves."""
        factors: dict[int, list[float | None]] = {}
        decays: list[float | None] = []
        for name, right in ({} if self._right is None else self._right.params).items():
            start = self._start.values[name].to("cpu", torch.float64)
            ours = self._after[name].to("cpu", torch.float64) - start
            theirs = right.detach().to("cpu", torch.float64) - start
            decays.append(_ratio(ours - theirs, start))
            for rank in self._owners[name].unique().tolist():
                own = self._owners[name] == rank
                factors.setdefault(rank, []).append(_ratio(ours[own], theirs[own]))
        by_rank = {rank: _common(each) for rank, each in sorted(factors.items())}
        known = {rank: factor for rank, factor in by_rank.items() if factor is not None}
        if known and len(known) == len(by_rank):
            return _scaled(known)
        decay = _common(decays)
        if not decay:
            return None
        return Cause(
            name="weight decay that is not the same",
            evidence=f"parameters differ by {decay:.2g} times themselves from what the same "
            "gradients make of the unsharded ones, as another weight decay does",
        )


def _ratio(one: torch.Tensor, other: torch.Tensor) -> float | None:
    """How many times ``other`` is ``one``; None if it is no multiple; NaN if nothing shows it."""
    size = float(other.square().sum())
    if size == 0:
        return float("nan") if not bool(one.any()) else None
    factor = float((one * other).sum()) / size
    rest = float((one - factor * other).norm())
    return factor if rest <= _PART * float(one.norm()) else None


def _common(factors: Sequence[float | None]) -> float | None:
    """The factor that all have that show one; None if they have none in common."""
    shown = [each for each in factors if each is None or not math.isnan(each)]
    known = [each for each in shown if each is not None]
    if not known or len(known) < len(shown):
        return None
    return known[0] if max(known) - min(known) <= _PART * max(map(abs, known)) else None


def _scaled(by_rank: dict[int, float]) -> Cause | None:
    factor = _common(list(by_rank.values()))
    wrong = {rank: each for rank, each in by_rank.items() if abs(each - 1) > _PART / 4}
    if not wrong:
        return None
    if factor is not None and len(wrong) == len(by_rank):
        return Cause(
            name="updates scaled by one factor",
            evidence=f"parameters move {factor:.3g} times as far as the same gradients move the "
            "unsharded ones: look at the rate, at what clips or scales gradients before a step, "
            "and at how often it is made",
        )
    told = ", ".join(f"rank {rank}'s move {each:.3g} times" for rank, each in wrong.items())
    return Cause(
        name="an optimizer that is not the same on all ranks",
        evidence=f"of the shards, {told} as far as the same gradients move the unsharded "
        "parameters: look at the rate on these ranks, at what clips or scales, and whether they "
        "make the step",
    )


def _cpu(value: Any) -> Any:
    return local(value).cpu() if isinstance(value, torch.Tensor) else value

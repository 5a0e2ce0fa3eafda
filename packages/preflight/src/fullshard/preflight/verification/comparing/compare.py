"""Compares one step's values of both runs, and keeps what differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.preflight.verification.names import module_of
from fullshard.preflight.verification.tolerance import Tolerance
from fullshard.preflight.verification.trace import Place, Trace, fingerprint, first_place, parts
from fullshard.preflight.verification.verdict import Difference, Phase

__all__ = ["Comparison", "Pair", "rms", "scale_of"]

_MOST_PAIRS = 6


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two tensors that differ, in 64 bits on the CPU.

    Attributes:
        ours: the sharded model's.
        theirs: the reference's.
        start: of an update, the value before the first one; else None.
    """

    ours: torch.Tensor
    theirs: torch.Tensor
    start: torch.Tensor | None


class Comparison:
    """Compares one step, on the rank that holds the reference.

    Attributes:
        differences: what differs.
        pairs: by name the first tensors that differ, if they are to be kept.
    """

    def __init__(self, tolerance: Tolerance, *, step: int, keeps: bool = False) -> None:
        """Start without differences. ``keeps``: keep the first tensors that differ."""
        self._tolerance = tolerance
        self._step = step
        self._size = 0.0  # the mean size of an element of any gradient
        self._terms: Mapping[str, float] = {}
        self._largest: Difference | None = None
        self._keeps = keeps
        self.differences: list[Difference] = []
        self.pairs: dict[str, Pair] = {}

    def larger(self, other: Difference | None) -> Difference | None:
        """Return ``other`` or this step's largest, whichever is closest to its tolerance."""
        both = [each for each in (other, self._largest) if each is not None]
        return max(both, key=lambda each: each.excess, default=None)

    def forget_updates(self, names: Iterable[str]) -> None:
        """Take back what was found of the updates of some parameters."""
        unknown = set(names)

        def is_known(found: Difference) -> bool:
            of_optimizer = found.phase in (Phase.UPDATE, Phase.STATE)
            return not of_optimizer or found.name.rpartition(" of ")[2] not in unknown

        self.differences = list(filter(is_known, self.differences))
        if self._largest is not None and not is_known(self._largest):
            self._largest = None

    def losses(
        self,
        name: str,
        came: float,
        wanted: float,
        size: float,
        traces: tuple[list[Trace], list[Trace]],
    ) -> Place:
        """Compare the losses of a step; return where the runs part, if they do.

        Args:
            name: which loss.
            came: the sharded model's.
            wanted: the reference's.
            size: the mean of the absolute losses of the batches, which may cancel.
            traces: traces of the modules, from which the first module that differs is found.
        """
        allowed = self._tolerance.relative * (size + 1e-30)
        error = abs(came - wanted) if math.isfinite(came) or math.isfinite(wanted) else 0.0
        error = math.inf if math.isnan(error) else error
        place = Place()
        if error > allowed:
            place = first_place(*traces, self._tolerance.relative)
        self._note(Phase.LOSS, name, error, allowed, module=place.module)
        return place

    def norms(
        self,
        gradients: Mapping[str, torch.Tensor | None],
        terms: Mapping[str, float],
        size: float | None = None,
    ) -> None:
        """Store the sizes of the reference's gradients, to which rounding is relative.

        Args:
            gradients: by name; all, or a layer's.
            terms: by name, the norms of what was added up to them.
            size: the mean size of an element of all of them, if these are not all.
        """
        self._size = rms(gradients.values()) if size is None else size
        self._terms = terms

    def untied(self, names: Iterable[str]) -> None:
        """Note parameters that are tied in one model only."""
        for name in names:
            self._note(Phase.BUILD, name, math.inf, 0.0)

    def prints(self, phase: Phase, name: str, came: torch.Tensor, wanted: torch.Tensor) -> None:
        """Compare a parameter with a fingerprint of what it was."""
        print_ = fingerprint(came)
        allowed = self._tolerance.relative
        if phase is Phase.BUILD:
            allowed = torch.finfo(came.dtype).eps if came.is_floating_point() else 0.0
        self._note(phase, name, parts(print_, wanted), allowed)

    def missing(self, why: str, module: str) -> None:
        """Note a gradient that only one run, or only some ranks, have; ``why`` says which."""
        self._note(Phase.MISSING, why, math.inf, 0.0, module=module)

    def tensors(
        self,
        phase: Phase,
        name: str,
        came: torch.Tensor | None,
        wanted: torch.Tensor | None,
        start: torch.Tensor | None = None,
    ) -> None:
        """Compare two tensors; None stands for zeros. ``start``: before the first update."""
        if came is None and wanted is None:
            return
        if came is None or wanted is None:
            one = wanted if came is None else came
            assert one is not None, "one of them is there"
            if float(one.double().norm()) > 0:
                self._note(Phase.MISSING, name, float(one.double().norm()), 0.0)
            return
        if not _has_size(came, wanted):
            self._note(phase, name, _unlike(came, wanted), 0.0)
            return
        ours, theirs, error = _apart(came, wanted)
        before = None if start is None else start.to("cpu", torch.float64)
        allowed = self._allowed(phase, name, theirs, came.dtype, before)
        scale = None
        if error > allowed:
            scale = scale_of(ours, theirs, self._tolerance.relative)
            if self._keeps and len(self.pairs) < _MOST_PAIRS:
                self.pairs[name] = Pair(ours=ours, theirs=theirs, start=before)
        self._note(phase, name, error, allowed, scale=scale)

    def states(
        self, name: str, key: str, pair: tuple[torch.Tensor, torch.Tensor], size: float
    ) -> None:
        """Compare what an optimizer keeps of a parameter under ``key``.

        Args:
            name: of the parameter.
            key: under which the optimizer keeps it.
            pair: the sharded run's, and the reference's.
            size: the mean size of an element of all that is kept under that key.
        """
        error, allowed = _measured(*pair, self._tolerance.of(pair[0].dtype), size)
        self._note(Phase.STATE, f"{key} of {name}", error, allowed)

    def replicas(
        self, phase: Phase, name: str, shards: Iterable[Mapping[int, torch.Tensor]]
    ) -> None:
        """Compare the copies of each shard, by rank, with the first of them."""
        found = [
            (*self._copies(phase, name, copies[min(copies)], copies[rank]), rank)
            for copies in shards
            for rank in sorted(copies)[1:]
        ]
        error, allowed, _ = max(found, key=lambda each: each[0] - each[1])
        wrong = tuple(sorted(rank for error, allowed, rank in found if error > allowed))
        self._note(phase, name, error, allowed, ranks=wrong)

    def _copies(
        self, phase: Phase, name: str, wanted: torch.Tensor, came: torch.Tensor
    ) -> tuple[float, float]:
        """By how much two copies of a shard differ, and what rounding allows."""
        if phase is Phase.GRADIENT and _has_size(came, wanted):
            _, theirs, error = _apart(came, wanted)
            return error, self._allowed(phase, name, theirs, came.dtype, None)
        return _measured(came, wanted, self._tolerance.of(came.dtype))

    def activations(
        self,
        phase: Phase,
        layer: str,
        pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
        beside: float,
        locate: Callable[[], str],
    ) -> None:
        """Compare what a layer returned, or handed back, with what it does when run again.

        Args:
            phase: which of the two.
            layer: its name.
            pairs: what the sharded run saw, and what the reference made.
            beside: the mean size of an element of what it was made from; rounding is of that size.
            locate: returns which module in it differs first.
        """
        for came, wanted in pairs:
            error, allowed = _measured(came, wanted, self._tolerance, beside)
            module = locate() if error > allowed else layer
            self._note(phase, layer, error, allowed, module=module)

    def _allowed(
        self,
        phase: Phase,
        name: str,
        theirs: torch.Tensor,
        dtype: torch.dtype,
        start: torch.Tensor | None,
    ) -> float:
        relative, norm = self._tolerance.relative, float(theirs.norm())
        if phase is Phase.BUILD:
            return torch.finfo(dtype).eps * norm if dtype != torch.float64 else 0.0
        if phase is Phase.GRADIENT:  # terms may have cancelled, their rounding has not
            terms = max(norm, self._terms.get(name, 0.0))
            return relative * (terms + self._size * math.sqrt(theirs.numel()))
        if start is None:
            return relative * norm + relative * math.sqrt(theirs.numel())
        moved = float((theirs - start).norm())
        own = self._tolerance.of(dtype)
        return own.of_update(norm=norm, moved=moved, steps=self._step + 1)

    def _note(
        self,
        phase: Phase,
        name: str,
        error: float,
        allowed: float,
        **more: Any,
    ) -> None:
        """Note what was compared: by default, a parameter, or something of one."""
        more.setdefault("module", module_of(name.rpartition(" of ")[2]))
        found = Difference(
            phase=phase, step=self._step, name=name, error=error, allowed=allowed, **more
        )
        if error > allowed:
            self.differences.append(found)
        self._largest = self.larger(found)


def rms(tensors: Iterable[torch.Tensor | None]) -> float:
    """Return the root of the mean square of all elements; 0 of none."""
    found = [each for each in tensors if each is not None and each.is_floating_point()]
    numel = sum(each.numel() for each in found)
    total = sum(float(each.double().square().sum()) for each in found)
    return math.sqrt(total / numel) if numel else 0.0


def _has_size(came: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether two tensors differ by a size; else by a number of elements."""
    return came.shape == wanted.shape and came.is_floating_point()


def _measured(
    came: torch.Tensor, wanted: torch.Tensor, tolerance: Tolerance, beside: float = 0.0
) -> tuple[float, float]:
    """Return by how much two tensors differ, and what rounding allows.

    Args:
        came: the sharded run's.
        wanted: the reference's.
        tolerance: the allowed part.
        beside: the mean size of an element that counts in addition to the reference's own.
    """
    if not _has_size(came, wanted):
        return _unlike(came, wanted), 0.0
    _, theirs, error = _apart(came, wanted)
    size = float(theirs.norm()) + beside * math.sqrt(theirs.numel())
    return error, tolerance.relative * size


def _unlike(came: torch.Tensor, wanted: torch.Tensor) -> float:
    """How many elements differ, of whole numbers; all if shapes do."""
    return float((came.cpu() != wanted.cpu()).sum()) if came.shape == wanted.shape else math.inf


def _apart(came: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return both in 64 bits, without non-finite elements, and the norm of their difference."""
    ours, theirs = came.to("cpu", torch.float64), wanted.to("cpu", torch.float64)
    finite = theirs.isfinite()
    rest = [each.where(~finite, 0.0).nan_to_num(2.0, 1.0, -1.0) for each in (ours, theirs)]
    alike = torch.equal(ours.isfinite(), finite) and torch.equal(*rest)
    ours, theirs = ours.where(finite, 0.0), theirs.where(finite, 0.0)
    return ours, theirs, float((ours - theirs).norm()) if alike else math.inf


def scale_of(ours: torch.Tensor, theirs: torch.Tensor, relative: float) -> float | None:
    """Return the factor between two tensors, if they differ by a factor only; else None."""
    size = float(theirs.square().sum())
    if size == 0:
        return None
    factor = float((ours * theirs).sum()) / size
    rest = float((ours - factor * theirs).norm())
    return factor if rest <= relative * max(abs(factor), 1.0) * 4 * math.sqrt(size) else None

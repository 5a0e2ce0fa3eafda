"""Compares one step's values of both runs, and keeps what differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch

from fullshard.preflight.verification.names import module_of
from fullshard.preflight.verification.tolerance import Tolerance
from fullshard.preflight.verification.trace import Trace, fingerprint
from fullshard.preflight.verification.verdict import Difference, Phase

__all__ = ["Comparison", "rms"]


class Comparison:
    """Compares one step, on the rank that holds the reference."""

    def __init__(self, tolerance: Tolerance, *, step: int) -> None:
        self._tolerance = tolerance
        self._step = step
        self._size = 0.0  # the mean size of an element of any gradient
        self._noise: dict[str, float] = {}  # per parameter, what of its gradient is rounding
        self._largest: Difference | None = None
        self.differences: list[Difference] = []

    def larger(self, other: Difference | None) -> Difference | None:
        """Return ``other`` or this step's largest, whichever is closest to its tolerance."""
        both = [each for each in (other, self._largest) if each is not None]
        return max(both, key=lambda each: each.excess, default=None)

    def forget_updates(self, names: Iterable[str]) -> None:
        """Takes back what was found of the updates of some parameters."""
        unknown = set(names)
        self.differences = [
            each
            for each in self.differences
            if each.phase is not Phase.UPDATE or each.name not in unknown
        ]
        largest = self._largest
        if largest is not None and largest.phase is Phase.UPDATE and largest.name in unknown:
            self._largest = None

    def losses(
        self,
        came: float,
        wanted: float,
        size: float,
        traces: tuple[list[Trace], list[Trace]] | None,
    ) -> None:
        """Compares the losses of a step.

        Args:
            came: the sharded model's.
            wanted: the reference's.
            size: the mean of the absolute losses of the batches, which may cancel.
            traces: traces of the modules, from which the first module that differs is found.
        """
        allowed = self._tolerance.at(self._step) * (size + 1e-30)
        error = abs(came - wanted) if math.isfinite(came) or math.isfinite(wanted) else 0.0
        error = math.inf if math.isnan(error) else error
        module = ""
        if error > allowed and traces is not None:
            module = self.first_module(*traces)
        self._note(Phase.LOSS, "loss", error, allowed, module=module)

    def first_module(self, theirs: list[Trace], ours: list[Trace]) -> str:
        """Returns the first module whose output differs, by the fingerprints; "" if none does."""
        for one, other in zip(ours, theirs, strict=True):
            for name, found in one.outputs.items():
                wanted = other.outputs.get(name, found[:0])
                if wanted.shape != found.shape or (
                    _parts(found, wanted) > self._tolerance.at(self._step)
                ):
                    return name
        return ""

    def norms(
        self, gradients: Mapping[str, torch.Tensor | None], size: float | None = None
    ) -> None:
        """Store the sizes of the reference's gradients, to which rounding is relative.

        Args:
            gradients: by name; all, or a layer's.
            size: the mean size of an element of all of them, if these are not all.
        """
        self._size = rms(gradients.values()) if size is None else size
        for name, grad in gradients.items():
            if grad is not None and (norm := float(grad.double().norm())) > 0:
                floor = self._tolerance.at(self._step) * self._size * math.sqrt(grad.numel())
                self._noise[name] = min(2.0, floor / norm)

    def untied(self, names: Iterable[str]) -> None:
        """Note parameters that are tied in one of the two models only."""
        for name in names:
            self._note(Phase.BUILD, name, math.inf, 0.0, module=module_of(name))

    def prints(self, phase: Phase, name: str, came: torch.Tensor, wanted: torch.Tensor) -> None:
        """Compares a parameter with a fingerprint of what it was."""
        print_ = fingerprint(came)
        allowed = self._tolerance.at(self._step)
        if phase is Phase.BUILD:
            allowed = torch.finfo(came.dtype).eps if came.is_floating_point() else 0.0
        self._note(phase, name, _parts(print_, wanted), allowed, module_of(name))

    def missing(self, why: str, module: str) -> None:
        """Notes a gradient that only one run, or only some ranks, have; ``why`` says which."""
        self._note(Phase.MISSING, why, math.inf, 0.0, module=module)

    def tensors(
        self,
        phase: Phase,
        name: str,
        came: torch.Tensor | None,
        wanted: torch.Tensor | None,
        start: torch.Tensor | None = None,
    ) -> None:
        """Compares two tensors; None stands for zeros. ``start``: before the first update."""
        if came is None and wanted is None:
            return
        if came is None or wanted is None:
            one = wanted if came is None else came
            assert one is not None, "one of them is there"
            if float(one.double().norm()) > 0:
                self._note(Phase.MISSING, name, float(one.double().norm()), 0.0, module_of(name))
            return
        if came.shape != wanted.shape or not came.is_floating_point():
            self._note(phase, name, _unlike(came, wanted), 0.0, module_of(name))
            return
        ours, theirs, error = _apart(came, wanted)
        allowed = self._allowed(phase, name, ours, theirs, came.dtype, start)
        scale = _scale(ours, theirs, self._tolerance.at(self._step)) if error > allowed else None
        self._note(phase, name, error, allowed, module_of(name), scale)

    def activations(
        self,
        phase: Phase,
        layer: str,
        pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
        beside: float,
        locate: Callable[[], str],
    ) -> None:
        """Compares what a layer returned, or handed back, with what it does when run again.

        Args:
            phase: which of the two.
            layer: its name.
            pairs: what the sharded run saw, and what the reference made.
            beside: the mean size of an element of what it was made from; rounding is of that size.
            locate: returns which module in it differs first.
        """
        relative = self._tolerance.at(self._step)
        for came, wanted in pairs:
            if came.shape != wanted.shape or not came.is_floating_point():
                error, allowed = _unlike(came, wanted), 0.0
            else:
                _, theirs, error = _apart(came, wanted)
                allowed = relative * (float(theirs.norm()) + beside * math.sqrt(theirs.numel()))
            module = locate() if error > allowed else layer
            self._note(phase, layer, error, allowed, module=module)

    def _allowed(
        self,
        phase: Phase,
        name: str,
        ours: torch.Tensor,
        theirs: torch.Tensor,
        dtype: torch.dtype,
        start: torch.Tensor | None,
    ) -> float:
        relative, norm = self._tolerance.at(self._step), float(theirs.norm())
        if phase is Phase.BUILD:
            return torch.finfo(dtype).eps * norm if dtype != torch.float64 else 0.0
        if phase is Phase.GRADIENT:
            return relative * (norm + self._size * math.sqrt(theirs.numel()))
        if start is None:
            return relative * norm + relative * math.sqrt(theirs.numel())
        # An optimizer may divide by the gradient's size: where the gradient is small, the update is
        # uncertain of the update. Adam's is uncertain in the elements whose gradient is rounding.
        moved = float((theirs - start.to("cpu", torch.float64)).norm())
        return relative * norm + moved * (math.sqrt(relative) + self._noise.get(name, 0.0))

    def _note(
        self,
        phase: Phase,
        name: str,
        error: float,
        allowed: float,
        module: str = "",
        scale: float | None = None,
    ) -> None:
        found = Difference(
            phase=phase,
            step=self._step,
            name=name,
            module=module,
            error=error,
            allowed=allowed,
            scale=scale,
        )
        if error > allowed:
            self.differences.append(found)
        self._largest = (
            found
            if self._largest is None
            else max(found, self._largest, key=lambda each: each.excess)
        )


def rms(tensors: Iterable[torch.Tensor | None]) -> float:
    """Returns the root of the mean square of all elements; 0 of none."""
    found = [each for each in tensors if each is not None and each.is_floating_point()]
    numel = sum(each.numel() for each in found)
    total = sum(float(each.double().square().sum()) for each in found)
    return math.sqrt(total / numel) if numel else 0.0


def _unlike(came: torch.Tensor, wanted: torch.Tensor) -> float:
    """How many elements differ, of whole numbers; all if shapes do."""
    return float((came.cpu() != wanted.cpu()).sum()) if came.shape == wanted.shape else math.inf


def _apart(came: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return both in 64 bits, without non-finite elements, and the norm of their difference."""
    ours, theirs = came.to("cpu", torch.float64), wanted.to("cpu", torch.float64)
    finite = theirs.isfinite()
    alike = torch.equal(ours.isfinite(), finite)
    ours, theirs = ours.where(finite, 0.0), theirs.where(finite, 0.0)
    return ours, theirs, float((ours - theirs).norm()) if alike else math.inf


def _parts(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """By how much two fingerprints differ, as part of the norms in them."""
    if found.numel() == 0:
        return 0.0
    norms = wanted[::2].abs().clamp(min=1e-30)
    return float(((found - wanted).view(-1, 2).abs() / norms[:, None]).max())


def _scale(ours: torch.Tensor, theirs: torch.Tensor, relative: float) -> float | None:
    """Return the factor between two tensors, if one is a multiple of the other."""
    size = float(theirs.square().sum())
    if size == 0:
        return None
    factor = float((ours * theirs).sum()) / size
    rest = float((ours - factor * theirs).norm())
    return factor if rest <= relative * max(abs(factor), 1.0) * 4 * math.sqrt(size) else None

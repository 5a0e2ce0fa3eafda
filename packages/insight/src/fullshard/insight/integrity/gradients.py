"""Checksums of sharded gradients, from their reduction to the optimizer's step.

Owns an observer that notes checksums when reduced gradients are in place, and compares them.

[Note: lawful changes] Clipping, a gradient scaler and hooks change gradients, and torch does not
count all changes of a ``DTensor`` in its version. Therefore a change counts as damage only if one
bit of one gradient changed and no other bit did. Programs scale or clip many elements at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from fullshard.comm import Event, EventKind
from fullshard.insight.integrity.checksums import checksums, is_one_bit
from fullshard.insight.integrity.findings import Finding, Findings
from fullshard.sharding import FSDPParam, FSDPParamGroup
from fullshard.sharding.spi import local_of

__all__ = ["ReducedGradients"]


@dataclass(frozen=True)
class _Note:
    """A gradient as it was: ``identity`` of the tensor, and the checksum of this rank's part."""

    identity: int
    checksum: torch.Tensor


class ReducedGradients:
    """An observer of one step that compares gradients with those that the reductions gave.

    Args:
        groups: whose gradients are compared.
        findings: where a changed gradient is noted.
    """

    def __init__(self, groups: Sequence[FSDPParamGroup], findings: Findings) -> None:
        self._groups = groups
        self._findings = findings
        self._noted: dict[FSDPParam, _Note] = {}

    @cached_property
    def _by_name(self) -> dict[str, list[FSDPParamGroup]]:
        """The groups by name; asked for in the first reduction, as a root names its groups."""
        found: dict[str, list[FSDPParamGroup]] = {}
        for group in self._groups:
            found.setdefault(group.name, []).append(group)
        return found

    def on_event(self, event: Event) -> None:
        """Note gradients that are in place; compare them before a reduction is added to them."""
        if event.kind is EventKind.REDUCE:
            self._compare(self._by_name.get(event.name, ()))
        elif event.kind is EventKind.REDUCE_DONE:
            present = _present(self._by_name.get(event.name, ()))
            sums = checksums([local_of(gradient) for gradient in present.values()])
            for (param, gradient), each in zip(present.items(), sums, strict=True):
                self._noted[param] = _Note(id(gradient), each)

    def compare(self) -> None:
        """Compare all gradients with what the last reduction of each gave."""
        self._compare(self._groups)

    def _compare(self, groups: Iterable[FSDPParamGroup]) -> None:
        """Add a finding if the gradients of ``groups`` differ by one bit."""
        same = {
            param: local_of(gradient)
            for param, gradient in _present(groups).items()
            if param in self._noted and self._noted[param].identity == id(gradient)
        }
        sums = dict(zip(same, checksums(list(same.values())), strict=True))
        self._findings.comparisons += len(same)
        changed = [each for each in same if not torch.equal(sums[each], self._noted[each].checksum)]
        if len(changed) != 1:  # see [Note: lawful changes]
            return
        param = changed[0]
        if is_one_bit(self._noted[param].checksum, sums[param], same[param].numel()):
            self._findings.add(
                Finding(
                    stage="reduced gradient",
                    ranks=(dist.get_rank(),),
                    tensor=param.name,
                    what="a bit of it changed after its reduction",
                )
            )


def _present(groups: Iterable[FSDPParamGroup]) -> dict[FSDPParam, torch.Tensor]:
    """Return the sharded gradients that the parameters of ``groups`` have now."""
    gradients = {param: param.sharded.grad for group in groups for param in group.params}
    return {param: each for param, each in gradients.items() if each is not None}

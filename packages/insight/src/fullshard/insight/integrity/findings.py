"""The results of checks, and the error that all ranks raise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["DamagedNumbersError", "Finding", "Findings"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A number that changed without a reason.

    Attributes:
        stage: where: "gather", "reduction", "sum", "reduced gradient", "shard", "optimizer state",
            "gradient", "replicas" or "range".
        ranks: that may have damaged it; of a collective the sender and the receiver.
        tensor: the full name of the parameter, or the number.
        what: a sentence.
    """

    stage: str
    ranks: tuple[int, ...]
    tensor: str
    what: str

    def __str__(self) -> str:
        """Return the finding as text."""
        ranks = " and ".join(map(str, self.ranks))
        return f"{self.stage} of {self.tensor}, rank {ranks}: {self.what}"


_OWN_STATE = (
    ". If twice() finds other bits on all ranks, or in each step that is due, it is probably no "
    "damage: compute changes state outside of buffers (a plain tensor, a counter, an iterator of "
    "inputs), or runs kernels that are not deterministic. Make such state a buffer, or put it back "
    "at the beginning of compute"
)


class DamagedNumbersError(RuntimeError):
    """Numbers changed that nothing should have changed; raised on all ranks alike.

    Attributes:
        step: in which it was found, from 1.
        findings: of all ranks.
    """

    def __init__(self, step: int, findings: tuple[Finding, ...]) -> None:
        self.step = step
        self.findings = findings
        shown = "\n".join(f"  {each}" for each in findings[:8])
        more = f"\n  and {len(findings) - 8} more" if len(findings) > 8 else ""
        computed = any(each.stage == "gradient" for each in findings)
        super().__init__(
            f"damaged numbers in step {step}:\n{shown}{more}\nThe optimizer has not stepped since. "
            "Resume from a checkpoint without the host of these ranks"
            f"{_OWN_STATE if computed else ''}"
        )


class Findings:
    """The findings of one rank, until all ranks raise them."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self._process_group = process_group
        self._found: list[Finding] = []
        self.comparisons = 0
        self.reduced: list[tuple[str, torch.Tensor]] = []  # what this rank sent, by tensor

    def add(self, finding: Finding) -> None:
        """Add what this rank found."""
        if finding not in self._found:
            self._found.append(finding)

    def raise_together(self, step: int) -> None:
        """Raise what any rank found, on all of them; a collective call.

        Raises:
            DamagedNumbersError: if any rank found something.
        """
        everyone: list[Any] = [None] * dist.get_world_size(self._process_group)
        found, self._found = self._found, []
        dist.all_gather_object(everyone, found, group=self._process_group)
        alike = dict.fromkeys(finding for each in everyone for finding in each)
        if alike:
            raise DamagedNumbersError(step, tuple(alike))

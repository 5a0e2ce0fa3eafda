"""The settings of a replica group in a run.

Owns ``ElasticOptions`` and the checks of its values. Everything else in this package takes it as it
is.
"""

from __future__ import annotations

import math
import re
import socket
from dataclasses import dataclass, field

import torch

__all__ = ["ElasticOptions"]

_ADDRESS = re.compile(r"https?://.+:\d+")


@dataclass(frozen=True, kw_only=True)
class ElasticOptions:
    """How a replica group takes part in a run.

    Attributes:
        lighthouse: the address of the run's lighthouse, such as ``"http://head:29510"``.
        group: the name of this replica group, equal on its ranks. Gradients are added in the order
            of names. Two groups may not have equal names; a group that starts again keeps its name.
        timeout: seconds that a rank waits for other groups: in a reduction, in a vote, and for the
            state of a run that its group joins.
        quorum_timeout: seconds that a group waits for a quorum at the beginning of a step.
        min_groups: a step with fewer contributing groups is not committed.
        max_dropped: after more dropped steps in a row, ``commit`` raises. A group that joins raises
            after half as many: a state that does not arrive must not end the other groups.
        average: whether gradients are averaged over groups; False adds them, for a loss that is
            divided by the tokens of all groups.
        between: ``torch.bfloat16`` sends gradients in that dtype between groups; they are added in
            float32 or wider. None: they are sent in the reduce dtype.
        host: the address of this host that other groups reach.

    Raises:
        ValueError: if a value is not allowed; the message names allowed values.
    """

    lighthouse: str
    group: str
    timeout: float = 60.0
    quorum_timeout: float = 120.0
    min_groups: int = 1
    max_dropped: int = 20
    average: bool = True
    between: torch.dtype | None = None
    host: str = field(default_factory=socket.gethostname)

    def __post_init__(self) -> None:
        """Check the values."""
        if not _ADDRESS.fullmatch(self.lighthouse):
            raise ValueError(
                f"lighthouse is {self.lighthouse!r}; pass the address that fullshard-lighthouse "
                "printed, such as 'http://head:29510'"
            )
        if not self.group or ":" in self.group or "/" in self.group:
            raise ValueError(
                f"group is {self.group!r}; pass a name without ':' and '/', which no other replica "
                "group of the run has, such as 'a'"
            )
        for name in ("timeout", "quorum_timeout"):
            seconds = getattr(self, name)
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"{name} is {seconds!r}; pass a positive number of seconds")
        for name in ("min_groups", "max_dropped"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; pass 1 or more")
        if self.between not in (None, torch.bfloat16):
            raise ValueError(
                f"between is {self.between!r}; pass torch.bfloat16, or None for the reduce dtype"
            )

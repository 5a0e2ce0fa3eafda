"""What travels between the pytest process and its rank processes."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from pathlib import Path


class Outcome(enum.Enum):
    """How one rank's share of a job ended."""

    READY = "the rank's process group is up"
    RETURNED = "the function returned"
    RAISED = "the function raised"
    SKIPPED = "the function called pytest.skip"
    DIED = "the process ended before it reported"
    STUCK = "the rank was still busy when it was killed"
    SETTLED = "the ranks met at the barrier that follows a job"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """The order for a rank process; paths are those of its pool's folder, ``timeout`` of gloo."""

    rank: int
    world_size: int
    store: Path
    stacks: Path
    log: Path
    environment: Mapping[str, str]
    timeout: float = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One function call for one rank; ``payload`` is a cloudpickle of ``(fn, args, kwargs)``."""

    payload: bytes
    seed: int
    warning_filters: bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settle:
    """The order to meet the other ranks at a barrier and to forget the last job."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What one rank says of a job.

    ``payload`` is the pickled result, ``text`` the traceback, ``process_groups`` how many there are
    after it.
    """

    outcome: Outcome
    payload: bytes = b""
    text: str = ""
    process_groups: int = 0

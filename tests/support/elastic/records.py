"""What a rank writes down of each step that it committed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["Record", "digest_of", "lineage_of", "read_records"]


@dataclass(frozen=True, kw_only=True)
class Record:
    """A committed step on one rank.

    Attributes:
        group: its group's name; ``rank`` of ``ranks`` in it.
        step: the number of the step, from 0.
        contributors: groups whose gradients were added, with their numbers of ranks.
        joined: whether this group received the state of the run in this step.
        batch: the number of the group's batch.
        before: the lineage of the state before the step.
        after: and after it.
        loss: of this rank's rows, as ``float.hex`` writes it.
        digest: of this rank's shards of parameters and optimizer state after the step.
        seconds: that the step took, from begin to commit.
    """

    group: str
    rank: int
    ranks: int
    step: int
    contributors: list[str]
    joined: bool
    batch: int
    before: str
    after: str
    loss: str
    digest: str
    seconds: float

    def write(self, file: Any) -> None:
        file.write(json.dumps(asdict(self)) + "\n")
        file.flush()


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    """A digest of the bits of tensors, in order."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def read_records(folder: Path) -> list[Record]:
    records = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                records.append(Record(**json.loads(line)))
            except json.JSONDecodeError:  # the line that a kill cut off
                continue
    return records


def lineage_of(records: list[Record], last: str) -> list[list[Record]]:
    """The records of each step that led to the state ``last``, from the first step on."""
    by_after: dict[str, list[Record]] = {}
    for record in records:
        by_after.setdefault(record.after, []).append(record)
    steps = []
    while last in by_after:
        found = by_after[last]
        steps.append(found)
        last = found[0].before
    return steps[::-1]

"""Compares what the ranks of a run recorded with its replay."""

from __future__ import annotations

from pathlib import Path

import torch

from support.elastic.model import make_model
from support.elastic.records import lineage_of, read_records
from support.elastic.replay import Replay

__all__ = ["check_against_replay"]


def check_against_replay(
    folder: Path, ranks: dict[str, int], between: torch.dtype | None = None
) -> int:
    """Compare all records with a replay; return how many steps the run had.

    Raises:
        AssertionError: naming the first step, group and rank that differ.
    """
    records = read_records(folder)
    last = max(records, key=lambda each: each.step)
    steps = lineage_of(records, last.after)
    ends = {each.after for each in records if each.step == last.step}
    assert ends == {last.after}, "all groups end with one state"
    assert [found[0].step for found in steps] == list(range(last.step + 1))
    # The state before the first step is that of the first contributor, as it was initialised.
    (name,) = steps[0][0].contributors
    replay = Replay(make_model(seed=sum(map(ord, name))), ranks, between)
    for found in steps:
        losses = replay.step(found[0].contributors)
        for record in found:
            at = (record.step, record.group, record.rank)
            assert record.joined or record.loss == losses[record.group, record.rank], at
            assert record.digest == replay.digest(record), at
    return len(steps)

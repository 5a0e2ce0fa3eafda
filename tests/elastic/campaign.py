"""Faults in numbers at every stage of a step: how many of them the checks find.

    PYTHONPATH=tests python tests/elastic/campaign.py 1000 10000 OUT.json     (faults, comparisons)

Two ranks train a small model. Each fault flips one bit, or swaps two unequal elements, on one rank.
It counts as found if the next check names its stage, rank and tensor. Then come comparisons without
a fault, and the time that checks take in a step of a larger model.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from support.elastic.faults import STAGES, cost_of_a_step, run_campaign
from support.ranks import cpu_mesh, run_on_ranks, shutdown_pools

__all__ = ["campaign", "main"]

WIDTH = 1024


def _on_a_rank(faults: int, clean: int, rounds: int) -> dict[str, Any]:
    outcome = run_campaign(cpu_mesh(), faults=faults, clean=clean, seed=34)
    struck, found = outcome.struck.total(), outcome.found.total()
    return {
        "faults": struck,
        "found": found,
        "by_stage": {name: [outcome.found[name], outcome.struck[name]] for name in STAGES},
        "missed": outcome.missed,
        "comparisons": outcome.comparisons,
        "false_alarms": outcome.false_alarms,
        "seconds_of_a_step": cost_of_a_step(cpu_mesh(), width=WIDTH, rounds=rounds),
        "width": WIDTH,
    }


def campaign(faults: int, clean: int, rounds: int = 9) -> dict[str, Any]:
    """Run the campaign on two ranks; return what rank 0 found."""
    found: dict[str, Any] = run_on_ranks(_on_a_rank, 2, faults, clean, rounds, job_timeout=1500)[0]
    return found


def main() -> int:
    faults, clean = (int(word) for word in sys.argv[1:3])
    found = campaign(faults, clean)
    found["torch"] = torch.__version__
    found["cpu"] = platform.processor() or platform.machine()
    Path(sys.argv[3]).write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))
    shutdown_pools()
    return 0


if __name__ == "__main__":
    sys.exit(main())

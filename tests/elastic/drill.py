"""Replica groups that are killed and stopped at random, against a replay of what they recorded.

    PYTHONPATH=tests python tests/elastic/drill.py        (or: nox -s drill -- groups)

Three groups, of one, two and one ranks, train 300 steps or more. Again and again one rank is killed
(SIGKILL) or stopped (SIGSTOP) at a random phase of a step, or killed at a random moment of a join.
All ranks must hold, after every step that they committed, the bits that one process computes from
the recorded memberships.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

from support.elastic.check import check_against_replay
from support.elastic.records import read_records
from support.elastic.run import ElasticRun, Fault, JoinFault

__all__ = ["RANKS", "drill", "main"]

RANKS = {"a": 1, "b": 2, "c": 1}


def drill(folder: Path, *, seed: int, steps: int = 300) -> list[str]:
    """Run the drill in an empty folder; return its log.

    Raises:
        AssertionError: if any bit differs, or nothing moves.
    """
    generator = random.Random(seed)
    with ElasticRun(folder, RANKS) as run:
        for group in RANKS:
            run.start(group)
        while not run.together(3):
            run.follow()
        faults = 0
        while run.furthest < steps:
            if faults % 3:
                run.strike(Fault.drawn(generator, RANKS))
            else:
                run.fail_join(JoinFault.drawn(generator, RANKS))
            faults += 1
        run.finish()
    done = check_against_replay(folder, RANKS)
    records = read_records(folder)
    slowest = max(record.seconds for record in records)
    # A rank waits for a lost group in one message at most, then for the quorum without it.
    assert slowest < run.timeout + 5, f"a step took {slowest:.1f} s"
    joined = len({(record.group, record.step) for record in records if record.joined})
    return [
        *run.log,
        f"seed {seed}: {done} steps, {faults} faults, {run.restarts} restarts, {joined} times a "
        f"group joined; {len(records)} records equal the replay to the bit; the slowest committed "
        f"step took {slowest:.1f} s with a timeout of {run.timeout:.0f} s",
    ]


def main() -> int:
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    with tempfile.TemporaryDirectory() as folder:
        print("\n".join(drill(Path(folder), seed=seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

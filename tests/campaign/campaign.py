"""A campaign: many faults, drawn at random, in training jobs of a few ranks.

    PYTHONPATH=tests python tests/campaign/campaign.py --faults 1000      (or: nox -s campaign)

Each job has to end in the numbers of the job without a fault, or in an error on each rank that says
what happened; a job that ended is restarted from its checkpoint, and has to end in these numbers.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence

from support.campaign.faults import KINDS, Fault
from support.campaign.verdict import Verdict, judge

__all__ = ["campaign", "main"]


def campaign(
    seeds: Iterable[int], kinds: Sequence[str] = (), *, seconds: float = 20.0
) -> list[Verdict]:
    """Run the faults of these numbers, of ``kinds`` in turn if given.

    Print what went wrong, and a table at the end.
    """
    verdicts = []
    for seed in seeds:
        kind = kinds[seed % len(kinds)] if kinds else ""
        verdict = judge(Fault.drawn(seed, kind=kind, seconds=seconds))
        verdicts.append(verdict)
        print(f"{verdict.fault}: {verdict.ended}, {verdict.seconds:.1f} s", flush=True)
        for wrong in verdict.wrong:
            print(f"    WRONG: {wrong}", flush=True)
    ended = Counter((each.fault.kind, each.ended) for each in verdicts)
    faulty = Counter(each.fault.kind for each in verdicts if each.wrong)
    print(f"\n{'kind':24}{'right numbers':>14}{'errors':>8}{'wrong':>7}")
    for name in dict.fromkeys(each.fault.kind for each in verdicts):
        right, errors = ended[name, "the right numbers"], ended[name, "errors"]
        print(f"{name:24}{right:14}{errors:8}{faulty[name]:7}")
    slowest = max(verdicts, key=lambda each: each.seconds)
    print(f"{len(verdicts)} faults; the slowest took {slowest.seconds:.1f} s ({slowest.fault})")
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=100, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--kind", choices=KINDS, dest="kinds", nargs=1, help="of one kind only")
    kinds.add_argument(
        "--all",
        dest="kinds",
        action="store_const",
        const=list(KINDS),
        help="of all kinds in turn, also of those that a number alone does not draw",
    )
    parser.add_argument("--pause", type=float, default=20.0, help="seconds a rank is stopped for")
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.faults)
    return int(any(each.wrong for each in campaign(seeds, given.kinds or (), seconds=given.pause)))


if __name__ == "__main__":
    sys.exit(main())

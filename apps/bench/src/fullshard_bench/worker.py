"""One rank of a measurement, started by `fullshard_bench.launch`.

Owns reading the job, and telling progress, result and errors: through the standard output and
files in the job's folder.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

from fullshard_bench.errors import exit_code
from fullshard_bench.job import Job
from fullshard_bench.measuring import measure
from fullshard_bench.records import from_table, to_table
from fullshard_bench.turns import Alone, RingTurn, Turn, share_core
from fullshard_bench.world import local_world

__all__ = ["main"]


def main(folder: Path, rank: int, turn: Turn) -> int:
    """Measures; returns 0, or 2 after an error that the user can put right.

    Args:
        folder: the job's.
        rank: of the job.
        turn: when this process may work.
    """
    # Such warnings come from contestants, in every run; what matters is in the result.
    warnings.simplefilter("ignore")
    job = from_table(Job, json.loads((folder / "job.json").read_text(encoding="utf-8")))

    def tell(what: str, done: int, total: int) -> None:
        if rank == 0:
            line = json.dumps({"what": what, "done": done, "of": total})
            os.write(sys.__stdout__.fileno() if sys.__stdout__ else 1, f"{line}\n".encode())

    with turn:
        pass  # once the token is back, all have imported what they need

    def work() -> None:
        with local_world(job, folder, rank) as device:
            result = measure(job, device, tell, turn)
        if rank == 0 and result is not None:
            text = json.dumps(to_table(result))
            (folder / "result.json").write_text(text, encoding="utf-8")

    return exit_code(work, folder, rank)


if __name__ == "__main__":
    place = [int(word) for word in sys.argv[3:]]
    if place:
        share_core()
    code = main(Path(sys.argv[1]), int(sys.argv[2]), RingTurn(*place) if place else Alone())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing is left to do, and threads of process groups may be slow to end

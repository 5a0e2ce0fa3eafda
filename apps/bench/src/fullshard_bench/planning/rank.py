"""One rank of a case of `plan-time`: trains and is timed, or measures links.

Owns how steps are measured: all ranks meet before each, and a step takes as long as on its slowest.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

from fullshard.preflight import measure_links
from fullshard.samehost import set_shared_memory
from fullshard_bench.contestants.sharded import build_fullshard
from fullshard_bench.errors import exit_code
from fullshard_bench.launching.arena import real_arena
from fullshard_bench.launching.job import Job
from fullshard_bench.launching.ranks import Ranks
from fullshard_bench.launching.world import local_world
from fullshard_bench.measuring.memory import cpu_memory
from fullshard_bench.meshes import parse_mesh
from fullshard_bench.models.registry import make_workload
from fullshard_bench.models.workload import Shape
from fullshard_bench.planning.record import Steps
from fullshard_bench.planning.times import Task
from fullshard_bench.records.conversion import from_table, to_table
from fullshard_bench.settings import Settings

__all__ = ["main"]

_UNTIMED, _TIMED = 5, 30


def main(folder: Path, rank: int) -> int:
    """Measures; returns what to leave with, as `exit_code`."""
    task = from_table(Task, json.loads((folder / "task.json").read_text(encoding="utf-8")))
    case = task.case
    settings = Settings(
        model=case.model, rows=case.rows, tokens=case.tokens, threads=1, clip=0.0, exposed=False
    )
    job = Job(settings=settings, kind="mesh", mesh=str(case.ranks), trace=False)
    set_shared_memory(task.shared)

    def work() -> None:
        with local_world(job, folder, rank) as device:
            if task.links:
                links = measure_links()
                if rank == 0:
                    links.save(folder / "links.json")
                return
            steps = _measured(settings, case.ranks, device)
        if rank == 0:
            (folder / "steps.json").write_text(json.dumps(to_table(steps)), encoding="utf-8")

    return exit_code(work, folder, rank)


def _measured(settings: Settings, count: int, device: torch.device) -> Steps:
    arena = real_arena(parse_mesh(str(count)), device)
    assert arena is not None, "all ranks are of the mesh"
    workload = make_workload(settings.model, Shape(rows=settings.rows, tokens=settings.tokens))
    trainee = build_fullshard(workload, settings, arena)
    batch = workload.batch(torch.Generator().manual_seed(arena.rank))
    ranks, seconds = Ranks(arena.group), []
    for _ in range(_UNTIMED + _TIMED):
        ranks.meet()
        start = time.perf_counter()
        trainee.step(batch)
        seconds.append(time.perf_counter() - start)
    slowest = ranks.slowest(seconds[_UNTIMED:])
    memory = cpu_memory(trainee, lambda: trainee.step(batch), count)
    return Steps(ms=tuple(round(1e3 * each, 3) for each in slowest), peak=memory["peak"])


if __name__ == "__main__":
    code = main(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing is left to do, and threads of process groups may be slow to end

"""``MemoryCheckpoints`` beside ``async_save``: how long training waits, and how long a restore.

Owns the measurement, over ranks of this machine in two groups that stand for hosts. The sides take
turns in one run, with equal ranks and values. Figures are medians of rounds, on rank 0. Files are
read back while the system has them in memory, which a real restart does not find.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as multiprocessing
from torch.distributed.checkpoint.state_dict import get_state_dict

from fullshard.checkpoint import MemoryCheckpoints, PendingSave, async_save
from fullshard_bench.contestants.registry import build_contestant
from fullshard_bench.errors import BenchError
from fullshard_bench.launching.arena import real_arena
from fullshard_bench.launching.machine import describe_machine, describe_versions
from fullshard_bench.meshes import parse_mesh
from fullshard_bench.models.registry import make_workload
from fullshard_bench.models.workload import Shape
from fullshard_bench.settings import Settings

__all__ = [
    "SavesMeasured",
    "add_memory_checkpoints",
    "measure_memory_checkpoints",
    "saves_of",
    "table_of_memory_checkpoints",
]

_WARM = 2  # rounds that are not counted
_SHAPE = Shape(rows=1, tokens=64)
_ROWS = (
    ("call", "training waits in the call"),
    ("step", "the next step, beside the save"),
    ("whole", "until the save is complete"),
    ("restore", "restore"),
    ("restore_lost", "restore, one host lost"),
)


@dataclass(frozen=True, kw_only=True)
class SavesMeasured:
    """What is measured.

    Attributes:
        ranks: how many processes, with one thread each, on two hosts.
        rounds: how often each call is timed.
        folder: for files, on the disk to measure.
    """

    ranks: int
    rounds: int
    folder: Path


def add_memory_checkpoints(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--model", nargs="+", default=["gpt-small"], help="as `run` takes them")
    parser.add_argument("--ranks", type=int, default=4, help="processes, with one thread each")
    parser.add_argument("--rounds", type=int, default=15, help="how often each call is timed")
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure")
    parser.add_argument("--output", type=Path, help="a JSON file, and the table beside it")


def saves_of(options: argparse.Namespace) -> SavesMeasured:
    """Return what the options of the command ask for.

    Raises:
        BenchError: if there are not two hosts of equal ranks.
    """
    if options.ranks < 2 or options.ranks % 2:
        raise BenchError(f"--ranks {options.ranks}: must be even, for two hosts")
    return SavesMeasured(ranks=options.ranks, rounds=options.rounds, folder=options.folder)


def measure_memory_checkpoints(models: Sequence[str], asked: SavesMeasured) -> dict[str, Any]:
    """Return milliseconds by model, figure and side, and where they were measured."""
    found = {}
    for model in models:
        with tempfile.TemporaryDirectory(prefix="fullshard-bench-", dir=asked.folder) as folder:
            given = (asked, model, folder)
            multiprocessing.spawn(_run_rank, args=given, nprocs=asked.ranks, join=True)
            found[model] = json.loads(Path(folder, "result.json").read_text())
    return {
        "kind": "memory checkpoints",
        "ranks": asked.ranks,
        "rounds": asked.rounds,
        "machine": describe_machine(),
        "versions": describe_versions(),
        "models": found,
    }


def table_of_memory_checkpoints(result: dict[str, Any]) -> str:
    """Return a table of what ``measure_memory_checkpoints`` found, in Markdown."""
    machine = result["machine"]
    rows = [
        f"{result['ranks']} ranks in two groups that stand for hosts, {machine['cpu']}, "
        f"{machine['cores']} cores, torch {result['versions']['torch']}; medians of "
        f"{result['rounds']} rounds in turns, rank 0. Files are read from the system's cache.",
        "",
        "| model | | memory, ms | files, ms | ratio | no save, ms |",
        "|---|---|---|---|---|---|",
    ]
    for model, each in result["models"].items():
        for name, text in _ROWS:
            memory, files = each["memory"][name], each["files"].get(name)
            beside = "" if files is None else f"{files:.1f}"
            ratio = "" if files is None else f"{memory / files:.2f}"
            none = f"{each['none']['step']:.1f}" if name == "step" else ""
            rows.append(f"| {model} | {text} | {memory:.1f} | {beside} | {ratio} | {none} |")
        rows += ["", f"{model}: {each['mib']:.0f} MiB of shards in each rank's segment.", ""]
    return "\n".join(rows)


# -- one rank -------------------------------------------------------------------------------------


def _run_rank(rank: int, asked: SavesMeasured, model: str, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", asked.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=asked.ranks)
    arena = real_arena(parse_mesh(str(asked.ranks)), torch.device("cpu"))
    assert arena is not None, "the mesh has all ranks"
    workload = make_workload(model, _SHAPE)
    settings = Settings(model=model, rows=_SHAPE.rows, tokens=_SHAPE.tokens)
    trainee = build_contestant("fullshard", workload, settings, arena)
    batch = workload.batch(torch.Generator().manual_seed(rank))
    host = 2 * rank // asked.ranks
    memory_folder = Path("/dev/shm", Path(folder).name, str(host))
    memory = MemoryCheckpoints("bench", host=host, folder=memory_folder)
    trainee.step(batch)

    def state() -> dict[str, Any]:
        parameters, optimizer = get_state_dict(trainee.model, trainee.optimizer)
        return {"model": parameters, "optimizer": optimizer}

    files = Path(folder, "checkpoint")
    saves: dict[str, Callable[[int, dict[str, Any]], PendingSave] | None] = {
        "memory": memory.save,
        "files": lambda _, given: async_save(given, files),
        "none": None,
    }
    loads = {
        "memory": memory.restore,
        "files": lambda given: dcp.load(given, checkpoint_id=files),
    }
    memory.reserve(state())
    times = _saved(saves, state, lambda: trainee.step(batch), asked.rounds)
    found = {
        side: {k: statistics.median(v) for k, v in each.items()} for side, each in times.items()
    }
    for side, milliseconds in _loaded(loads, state, asked.rounds).items():
        found[side]["restore"] = milliseconds
    if host == 1:
        shutil.rmtree(memory_folder, ignore_errors=True)
        memory_folder.joinpath("bench").mkdir(parents=True, exist_ok=True)
    lost = _loaded({"memory": memory.restore}, state, asked.rounds)
    found["memory"]["restore_lost"] = lost["memory"]
    mib = sum(each.numel() * each.itemsize for each in _locals(state())) / 2**20
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps({**found, "mib": mib}))
    memory.purge()
    shutil.rmtree(memory_folder.parent, ignore_errors=True)
    dist.destroy_process_group()


def _saved(
    saves: dict[str, Callable[[int, dict[str, Any]], PendingSave] | None],
    state: Callable[[], dict[str, Any]],
    train: Callable[[], object],
    rounds: int,
) -> dict[str, dict[str, list[float]]]:
    """Return times of each side's saves, and of the next step; sides take turns."""
    times: dict[str, dict[str, list[float]]] = {side: {} for side in saves}
    for number in range(_WARM + rounds):
        for side in sorted(saves, reverse=number % 2 == 1):
            save, given = saves[side], state()
            dist.barrier()
            began = time.perf_counter()
            pending = None if save is None else save(number, given)
            called = time.perf_counter()
            train()
            stepped = time.perf_counter()
            if pending is not None:
                pending.result()
            ended = time.perf_counter()
            if number >= _WARM:
                for name, value in (
                    ("call", called - began),
                    ("step", stepped - called),
                    ("whole", ended - began),
                ):
                    times[side].setdefault(name, []).append(1000 * value)
    return times


def _loaded(
    loads: dict[str, Callable[[dict[str, Any]], object]],
    state: Callable[[], dict[str, Any]],
    rounds: int,
) -> dict[str, float]:
    """Return the median time of each side's loads; sides take turns."""
    times: dict[str, list[float]] = {side: [] for side in loads}
    for number in range(_WARM + rounds):
        for side in sorted(loads, reverse=number % 2 == 1):
            given = state()
            dist.barrier()
            began = time.perf_counter()
            loads[side](given)
            dist.barrier()
            if number >= _WARM:
                times[side].append(1000 * (time.perf_counter() - began))
    return {side: statistics.median(each) for side, each in times.items()}


def _locals(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value.to_local() if hasattr(value, "to_local") else value]
    if isinstance(value, dict):
        return [each for item in value.values() for each in _locals(item)]
    return []

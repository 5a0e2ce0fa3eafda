"""`state_dict()` and `load_state_dict()` of a sharded model, over ranks of this host.

Owns the measurement: it compares fullshard with torch's own `fully_shard`, in alternating rounds of
one run, with equal ranks and values. Neither call sends anything. Figures are medians of rounds, on
rank 0.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn

from fullshard_bench.contestants.registry import build_contestant
from fullshard_bench.launching.arena import Arena, real_arena
from fullshard_bench.meshes import parse_mesh
from fullshard_bench.models.registry import make_workload
from fullshard_bench.models.workload import Shape
from fullshard_bench.settings import Settings

__all__ = ["measure_state_dicts", "table_of_state_dicts"]

_WARM = 5  # rounds that are not counted
_SIDES = ("fullshard", "torch")
_SHAPE = Shape(rows=1, tokens=8)


def measure_state_dicts(
    models: Sequence[str], ranks: int, rounds: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Return milliseconds by model, call and side.

    Args:
        models: as ``run --model`` takes them.
        ranks: how many processes, with one thread each.
        rounds: how often each call is timed.
    """
    found = {}
    for model in models:
        with tempfile.TemporaryDirectory(prefix="fullshard-bench-") as folder:
            given = (ranks, model, rounds, folder)
            multiprocessing.spawn(_run_rank, args=given, nprocs=ranks, join=True)
            found[model] = json.loads(Path(folder, "result.json").read_text())
    return found


def table_of_state_dicts(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return a Markdown table of what ``measure_state_dicts`` found."""
    rows = ["| model | call | fullshard, ms | torch, ms | ratio |", "|---|---|---|---|---|"]
    for model, calls in found.items():
        for call, ms in calls.items():
            ours, theirs = ms["fullshard"], ms["torch"]
            rows.append(f"| {model} | {call} | {ours:.2f} | {theirs:.2f} | {ours / theirs:.2f} |")
    return "\n".join(rows)


# -- one rank -------------------------------------------------------------------------------------


def _run_rank(rank: int, ranks: int, model: str, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    arena = real_arena(parse_mesh(str(ranks)), torch.device("cpu"))
    assert arena is not None, "the mesh has all ranks"
    nets = {side: _trained(side, model, arena) for side in _SIDES}
    found = {
        "state_dict()": _medians({side: net.state_dict for side, net in nets.items()}, rounds),
        "load_state_dict(), its own": _medians(_loads(nets), rounds),
        "load_state_dict(), other values": _medians(_loads(nets, copied=True), rounds),
        "load_state_dict(assign=True)": _medians(_loads(nets, copied=True, assign=True), rounds),
    }
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _trained(side: str, model: str, arena: Arena) -> nn.Module:
    """Return the sharded model after one step: both sides have set themselves up."""
    workload = make_workload(model, _SHAPE)
    settings = Settings(model=model, rows=_SHAPE.rows, tokens=_SHAPE.tokens)
    trainee = build_contestant(side, workload, settings, arena)
    trainee.step(workload.batch(torch.Generator().manual_seed(0)))
    return trainee.model


def _loads(
    nets: dict[str, nn.Module], *, copied: bool = False, assign: bool = False
) -> dict[str, Callable[[], Any]]:
    """Return a call for each side: own tensors measure overhead, copies measure copying."""
    calls: dict[str, Callable[[], Any]] = {}
    for side, net in nets.items():
        state = net.state_dict()
        if copied:
            state = {name: value.clone() for name, value in state.items()}
        calls[side] = partial(net.load_state_dict, state, assign=assign)
    return calls


def _medians(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return each side's median in milliseconds; sides take turns, and begin in turns."""
    times: dict[str, list[float]] = {side: [] for side in calls}
    for number in range(_WARM + rounds):
        dist.barrier()
        for side in sorted(calls, reverse=number % 2 == 1):
            began = time.perf_counter()
            calls[side]()
            times[side].append(1000 * (time.perf_counter() - began))
    return {side: statistics.median(each[_WARM:]) for side, each in times.items()}

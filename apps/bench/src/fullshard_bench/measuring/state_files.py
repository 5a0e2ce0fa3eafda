"""AdamW with its state in memory and in files: time of a step and peak memory of a rank.

Owns the measurement, over ranks of this host. Both sides use processes of their own, because
the peak of a process is one number. The sides take turns. Figures are medians over turns, on
rank 0.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.tensor import DTensor

from fullshard.optim import FileTier, OffloadedOptimizer
from fullshard.sharding import fully_shard
from fullshard_bench.launching.machine import describe_machine, describe_versions
from fullshard_bench.models.registry import make_workload
from fullshard_bench.models.workload import Shape

__all__ = ["measure_state_files", "table_of_state_files"]

_WARM = 2  # steps that are not counted: the first makes the state
_STEPS = 5
_SIDES = ("memory", "files")
_SHAPE = Shape(rows=1, tokens=64)
_MIB = 2**20


def measure_state_files(
    models: Sequence[str], ranks: int, turns: int, tier: FileTier
) -> dict[str, Any]:
    """Return the figures of each model and side, and where they were measured.

    Args:
        models: as ``run --model`` takes them.
        ranks: how many processes, with one thread each.
        turns: how often each side is run.
        tier: where and how state is kept.
    """
    found = {}
    for model in models:
        runs: dict[str, list[dict[str, float]]] = {side: [] for side in _SIDES}
        for turn in range(turns):
            for side in sorted(_SIDES, reverse=turn % 2 == 1):
                with tempfile.TemporaryDirectory(prefix="fullshard-bench-") as results:
                    given = (ranks, model, side, tier, results)
                    multiprocessing.spawn(_run_rank, args=given, nprocs=ranks, join=True)
                    runs[side].append(json.loads(Path(results, "result.json").read_text()))
        found[model] = {
            side: {name: statistics.median(run[name] for run in each) for name in each[0]}
            for side, each in runs.items()
        }
    return {
        "kind": "state files",
        "ranks": ranks,
        "turns": turns,
        "bucket_mb": tier.bucket_mb,
        "machine": describe_machine(),
        "versions": describe_versions(),
        "models": found,
    }


def table_of_state_files(result: dict[str, Any]) -> str:
    """Return a table of what ``measure_state_files`` found, in Markdown."""
    machine = result["machine"]
    rows = [
        f"{result['ranks']} ranks, {machine['cpu']}, {machine['cores']} cores, torch "
        f"{result['versions']['torch']}; buckets of {result['bucket_mb']:g} MiB; medians of "
        f"{result['turns']} turns. The peak counts what a rank has beyond its start.",
        "",
        "| model | state in | optimizer step, ms | waits for the disk, ms | whole step, ms "
        "| peak, MiB | shards of parameters, MiB | state, MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model, sides in result["models"].items():
        for side, each in sides.items():
            rows.append(
                f"| {model} | {side} | {each['optimizer_ms']:.1f} | {each['wait_ms']:.1f} "
                f"| {each['step_ms']:.1f} | {each['peak_mib']:.0f} | {each['shards_mib']:.0f} "
                f"| {each['state_mib']:.0f} |"
            )
    return "\n".join([*rows, ""])


# -- one rank -------------------------------------------------------------------------------------


def _run_rank(rank: int, ranks: int, model: str, side: str, tier: FileTier, results: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{results}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    start = _resident("VmRSS")
    workload = make_workload(model, _SHAPE)
    torch.manual_seed(0)
    net = workload.build()
    for unit in workload.units(net):
        fully_shard(unit)
    fully_shard(net)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    if side == "files":
        optimizer = OffloadedOptimizer(optimizer, tier)
    batch = workload.batch(torch.Generator().manual_seed(rank))
    optimizer_ms, step_ms, waited = [], [], 0.0
    for number in range(_WARM + _STEPS):
        if number == _WARM:
            waited = _waited(optimizer)
            Path("/proc/self/clear_refs").write_text("5")  # begins a new peak
        dist.barrier()
        began = time.perf_counter()
        workload.loss(net, batch).backward()
        between = time.perf_counter()
        optimizer.step()
        ended = time.perf_counter()
        optimizer.zero_grad()
        optimizer_ms.append(1000 * (ended - between))
        step_ms.append(1000 * (ended - began))
    state = [
        value
        for each in optimizer.state.values()
        for value in each.values()
        if isinstance(value, torch.Tensor)
    ]
    result = {
        "optimizer_ms": statistics.median(optimizer_ms[_WARM:]),
        "step_ms": statistics.median(step_ms[_WARM:]),
        "wait_ms": 1000 * (_waited(optimizer) - waited) / _STEPS,
        "peak_mib": (_resident("VmHWM") - start) / _MIB,
        "shards_mib": sum(_nbytes(param) for param in net.parameters()) / _MIB,
        "state_mib": sum(_nbytes(value) for value in state) / _MIB,
    }
    if rank == 0:
        Path(results, "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _waited(optimizer: torch.optim.Optimizer) -> float:
    """Return the seconds that steps have waited for the disk."""
    if isinstance(optimizer, OffloadedOptimizer):
        return optimizer.statistics.wait_seconds
    return 0.0


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes


def _resident(name: str) -> int:
    """Return a size of this process, in bytes, as Linux counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = next(line for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(found.split()[1])

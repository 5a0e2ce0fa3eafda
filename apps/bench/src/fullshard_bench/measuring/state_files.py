"""AdamW with its state in memory, in files, and stepped beside backward: time and peak memory.

Owns the measurement, over ranks of this host. Each side uses processes of its own, because the peak
of a process is one number. The sides take turns. Figures are those of rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.optim import FileTier, OffloadedOptimizer, OverlappedStep
from fullshard.policies import FileOffloadPolicy, OffloadPolicy
from fullshard.samehost import set_shared_memory
from fullshard.sharding import Offload, fully_shard
from fullshard_bench.errors import BenchError
from fullshard_bench.launching.machine import describe_machine, describe_versions
from fullshard_bench.models.registry import make_workload
from fullshard_bench.models.workload import Shape

__all__ = [
    "StateFiles",
    "add_state_files",
    "measure_state_files",
    "state_files_of",
    "table_of_state_files",
]

_WARM = 2  # steps that are not counted: the first makes the state
_STEPS = 3
_SIDES = ("none", "memory", "beside", "files", "all")
_MIB = 2**20
_MORE = 64  # MiB that a rank may take beyond its parameters and three groups


@dataclass(frozen=True, kw_only=True)
class StateFiles:
    """The training that is measured.

    Attributes:
        ranks: how many processes, with one thread each.
        turns: how often each side is run.
        micro_batches: backwards per step.
        tokens: tokens of a micro-batch on a rank.
        tier: where and how state is kept.
        disk_mb_s: MB per second that all ranks together may read and write; 0: as the disk can.
        resident_mb: MiB of parameters and gradients in memory where all is in files.
        shared_memory: whether the ranks share memory for full parameters.
    """

    ranks: int
    turns: int
    micro_batches: int
    tokens: int
    tier: FileTier
    disk_mb_s: float
    resident_mb: float
    shared_memory: bool


def add_state_files(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--model", nargs="+", default=["gpt-124m"], help="as `run` takes them")
    parser.add_argument("--ranks", type=int, default=2, help="processes, with one thread each")
    parser.add_argument("--turns", type=int, default=3, help="how often each side is run")
    parser.add_argument("--bucket-mb", type=float, default=16, help="MiB of parameters at once")
    parser.add_argument("--micro-batches", type=int, default=1, help="backwards per step")
    parser.add_argument("--tokens", type=int, default=64, help="of a micro-batch on a rank")
    parser.add_argument(
        "--disk-mb-s", type=float, default=0.0, help="hold the tier's reads and writes to this rate"
    )
    parser.add_argument(
        "--resident-mb", type=float, default=16, help="of parameters and gradients in files"
    )
    parser.add_argument(
        "--no-shared-memory",
        dest="shared_memory",
        action="store_false",
        help="as ranks of several hosts: full parameters are in memory of each rank",
    )
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure")
    parser.add_argument("--output", type=Path, help="a JSON file, and the table beside it")


def state_files_of(options: argparse.Namespace) -> StateFiles:
    """Return what the options of the command ask for.

    Raises:
        BenchError: if the tier cannot be as asked.
    """
    try:
        tier = FileTier(options.folder, bucket_mb=options.bucket_mb)
    except ValueError as error:
        raise BenchError(str(error)) from None
    return StateFiles(
        ranks=options.ranks,
        turns=options.turns,
        micro_batches=options.micro_batches,
        tokens=options.tokens,
        tier=tier,
        disk_mb_s=options.disk_mb_s,
        resident_mb=options.resident_mb,
        shared_memory=options.shared_memory,
    )


def measure_state_files(models: Sequence[str], asked: StateFiles) -> dict[str, Any]:
    """Return the figures of each model and side, and where they were measured.

    Args:
        models: as ``run --model`` takes them.
        asked: the training.
    """
    found = {}
    for model in models:
        runs: dict[str, list[dict[str, float]]] = {side: [] for side in _SIDES}
        for turn in range(asked.turns):
            for side in _SIDES[:: -1 if turn % 2 else 1]:
                with tempfile.TemporaryDirectory(prefix="fullshard-bench-") as results:
                    given = (asked, model, side, results)
                    multiprocessing.spawn(_run_rank, args=given, nprocs=asked.ranks, join=True)
                    runs[side].append(json.loads(Path(results, "result.json").read_text()))
        found[model] = {
            side: {name: _of_turns(name, [run[name] for run in each]) for name in each[0]}
            for side, each in runs.items()
        }
    return {
        "kind": "state files",
        "ranks": asked.ranks,
        "turns": asked.turns,
        "micro_batches": asked.micro_batches,
        "tokens": asked.tokens,
        "disk_mb_s": asked.disk_mb_s,
        "bucket_mb": asked.tier.bucket_mb,
        "resident_mb": asked.resident_mb,
        "shared_memory": asked.shared_memory,
        "machine": describe_machine(),
        "versions": describe_versions(),
        "models": found,
    }


def _of_turns(name: str, values: Sequence[float]) -> float:
    """Return the smallest time of all turns, as other load only adds to it; else the median."""
    return min(values) if name.endswith("_ms") else statistics.median(values)


def table_of_state_files(result: dict[str, Any]) -> str:
    """Return a table of what ``measure_state_files`` found, in Markdown."""
    machine, disk = result["machine"], result["disk_mb_s"]
    rows = [
        f"{result['ranks']} ranks{'' if result['shared_memory'] else ' without shared memory'}, "
        f"{machine['cpu']}, {machine['cores']} cores, torch "
        f"{result['versions']['torch']}; {result['micro_batches']} micro-batches of "
        f"{result['tokens']} tokens; buckets of {result['bucket_mb']:g} MiB; "
        + (f"reads and writes held to {disk:g} MB/s for all ranks" if disk else "disk as it is")
        + f"; of {result['turns']} turns the smallest median of a time, and the median peak. "
        "Peaks count what a rank has beyond its start.",
        "",
        "| model | state | after backward, ms | waits for the disk, ms | whole step, ms "
        "| I/O of all ranks at that rate, ms | peak, MiB | of that shared, MiB "
        "| anonymous alone, MiB | pages of files alone, MiB | peak share (PSS), MiB |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    bars = []
    for model, sides in result["models"].items():
        for side, each in sides.items():
            io = f"{each['io_mb'] / disk * 1000:.0f}" if disk else "-"
            rows.append(
                f"| {model} | {side} | {each['optimizer_ms']:.1f} | {each['wait_ms']:.1f} "
                f"| {each['step_ms']:.1f} | {io} | {each['peak_mib']:.0f} "
                f"| {each['shared_mib']:.0f} | {each['anonymous_mib']:.0f} "
                f"| {each['mapped_mib']:.0f} | {each['share_mib']:.0f} |"
            )
        bars += _bars(model, sides, disk)
    return "\n".join([*rows, "", _SIDES_EXPLAINED, "", *bars, ""])


_SIDES_EXPLAINED = (
    "none: no optimizer; memory: state in memory; beside: `OverlappedStep`, state in memory; "
    "files: `OffloadedOptimizer` with a `FileTier`; all: also `FileOffloadPolicy` with "
    "`gradients=True`, whose reads and writes are not held to a rate. Pages of files are those of "
    "libraries, too, and the last three columns have a peak each. A share counts a page that "
    "several ranks map in equal parts on each."
)


def _bars(model: str, sides: dict[str, dict[str, float]], disk: float) -> list[str]:
    """Return a line for each ratio that a bar is about."""
    files, memory, beside = sides["files"], sides["memory"], sides["beside"]
    lines = []
    if disk:
        larger = max(memory["step_ms"], files["io_mb"] / disk * 1000)
        lines.append(
            f"- {model}: a step with state in files takes {files['step_ms'] / larger:.2f} times "
            "the larger of computing and I/O"
        )
    to_memory = beside["step_ms"] / memory["step_ms"]
    to_none = beside["step_ms"] / sides["none"]["step_ms"]
    lines.append(
        f"- {model}: a step beside backward takes {to_memory:.2f} times that with state in memory, "
        f"and {to_none:.2f} times forward and backward alone"
    )
    allowed = files["shards_mib"] + 3 * files["group_mib"] + _MORE
    for side, what in (("files", "state"), ("all", "parameters, gradients and state")):
        each, none = sides[side], sides["none"]
        lines.append(
            f"- {model}: the peak with {what} in files is {each['peak_mib']:.0f} MiB, and as a "
            f"share {each['share_mib']:.0f} MiB: {each['peak_mib'] - none['peak_mib']:+.0f} and "
            f"{each['share_mib'] - none['share_mib']:+.0f} MiB against a run without an optimizer; "
            f"shards of parameters, three largest groups and {_MORE} MiB are {allowed:.0f} MiB"
        )
    return lines


# -- one rank -------------------------------------------------------------------------------------


def _run_rank(rank: int, asked: StateFiles, model: str, side: str, results: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{results}/store", asked.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=asked.ranks)
    set_shared_memory(asked.shared_memory)
    if asked.disk_mb_s:
        _hold_disk_to(asked.disk_mb_s * 1e6 / asked.ranks)
    start, kinds = _resident("VmRSS"), _Peaks()
    workload = make_workload(model, Shape(rows=1, tokens=asked.tokens))
    torch.manual_seed(0)
    net = workload.build()
    units = [*workload.units(net), net]
    group_bytes = [_own_nbytes(unit, units) for unit in units]
    offload = _offload(side, asked)
    for unit in units:
        fully_shard(unit, offload_policy=offload)
    optimizer = _optimizer(side, net, asked.tier)
    batch = workload.batch(torch.Generator().manual_seed(rank))
    optimizer_ms, step_ms, waited, moved = [], [], 0.0, 0.0
    for number in range(_WARM + _STEPS):
        if number == _WARM:
            waited, moved = _traffic(optimizer)
            Path("/proc/self/clear_refs").write_text("5")  # begins a new peak
            kinds.begin()
        dist.barrier()
        began = time.perf_counter()
        for each in range(asked.micro_batches):
            last = each + 1 == asked.micro_batches
            beside = isinstance(optimizer, OverlappedStep) and last
            with optimizer.overlap() if beside else nullcontext():  # type: ignore[union-attr] # beside
                workload.loss(net, batch).backward()
        between = time.perf_counter()
        if optimizer is not None:
            optimizer.step()
        ended = time.perf_counter()
        net.zero_grad()
        optimizer_ms.append(1000 * (ended - between))
        step_ms.append(1000 * (ended - began))
    kinds.end()
    waited_after, moved_after = _traffic(optimizer)
    result = {
        "optimizer_ms": statistics.median(optimizer_ms[_WARM:]),
        "step_ms": statistics.median(step_ms[_WARM:]),
        "wait_ms": 1000 * (waited_after - waited) / _STEPS,
        "io_mb": asked.ranks * (moved_after - moved) / _STEPS / 1e6,
        "peak_mib": (_resident("VmHWM") - start) / _MIB,
        "shared_mib": _resident("RssShmem") / _MIB,
        "anonymous_mib": kinds.above_start["RssAnon"] / _MIB,
        "mapped_mib": kinds.above_start["RssFile"] / _MIB,
        "share_mib": kinds.above_start["Pss"] / _MIB,
        "shards_mib": sum(_nbytes(param) for param in net.parameters()) / _MIB,
        "group_mib": max(group_bytes) / _MIB,
    }
    if rank == 0:
        Path(results, "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _offload(side: str, asked: StateFiles) -> Offload:
    if side != "all":
        return OffloadPolicy()
    return FileOffloadPolicy(
        asked.tier.folder,
        resident_mb=asked.resident_mb,
        read_ahead_mb=asked.resident_mb / 2,
        gradients=True,
    )


class _Peaks:
    """The peaks of kinds of resident memory, which a thread reads every few milliseconds.

    Linux keeps only the peak of the sum.

    Attributes:
        above_start: bytes by kind, in Linux's words, above those at the start.
    """

    def __init__(self) -> None:
        """Note how much there is at the start."""
        self.above_start = {"RssAnon": 0, "RssFile": 0, "Pss": 0}
        self._start = {kind: _resident(kind) for kind in self.above_start}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def begin(self) -> None:
        """Look from now on."""
        self._thread.start()

    def end(self) -> None:
        """Look no more."""
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.005):
            for kind, start in self._start.items():
                self.above_start[kind] = max(self.above_start[kind], _resident(kind) - start)


def _optimizer(
    side: str, net: nn.Module, tier: FileTier
) -> torch.optim.Optimizer | OverlappedStep | None:
    if side == "none":
        return None
    plain = torch.optim.AdamW(net.parameters(), fused=True)
    if side in ("files", "all"):
        return OffloadedOptimizer(plain, tier)
    return OverlappedStep(plain, net) if side == "beside" else plain


def _hold_disk_to(rate: float) -> None:
    """Make each read and write of the tier take as long as a disk of ``rate`` bytes per second.

    The calls of all threads share one disk: each begins when the one before it is over.
    """
    lock, free_at = threading.Lock(), time.perf_counter()

    def held(call: Callable[..., int]) -> Callable[..., int]:
        def slower(*arguments: Any) -> int:
            nonlocal free_at
            moved = call(*arguments)
            with lock:
                free_at = max(free_at, time.perf_counter() - moved / rate) + moved / rate
                end = free_at
            time.sleep(max(0.0, end - time.perf_counter()))
            return moved

        return slower

    os.preadv, os.pwritev = held(os.preadv), held(os.pwritev)


def _traffic(optimizer: torch.optim.Optimizer | None) -> tuple[float, float]:
    """Return the seconds that steps have waited for the disk, and the bytes read and written."""
    if isinstance(optimizer, OffloadedOptimizer):
        found = optimizer.statistics
        return found.wait_seconds, float(found.bytes_read + found.bytes_written)
    return 0.0, 0.0


def _own_nbytes(unit: nn.Module, units: Sequence[nn.Module]) -> int:
    """Return the bytes of the full parameters of ``unit`` that no other unit inside it has."""
    inside = {
        p for other in units if other in set(unit.modules()) - {unit} for p in other.parameters()
    }
    return sum(param.nbytes for param in unit.parameters() if param not in inside)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes


def _resident(name: str) -> int:
    """Return a size of this process, in bytes, as Linux counts it."""
    source = "smaps_rollup" if name == "Pss" else "status"
    lines = Path("/proc/self", source).read_text().splitlines()
    found = next(line for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(found.split()[1])

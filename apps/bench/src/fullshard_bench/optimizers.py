"""A step of optimizers beside what they are compared with, over ranks of this host.

Owns the measurement: Muon beside the same step that gathers every matrix on every rank, written
here, and beside the owner's Newton-Schulz alone; 8-bit AdamW's step and state beside AdamW's. All
contestants take turns in one run of the same ranks, on the same gradients. Figures are medians of
rounds; a round's is the slowest rank's.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.comm import EventKind, EventLog, TensorSpec, all_gather_tensors, observe
from fullshard.optim import AdamW8bit, Muon, matrix_groups
from fullshard.optim.newton_schulz import COEFFICIENTS, orthogonalised
from fullshard.sharding import fully_shard
from fullshard_bench.machine import describe_machine, describe_versions
from fullshard_bench.models import make_workload
from fullshard_bench.workload import Shape

__all__ = ["measure_optimizers", "said_of_optimizers"]

_WARM = 2  # rounds that are not counted


def measure_optimizers(models: Sequence[str], ranks: int, rounds: int) -> dict[str, Any]:
    """Returns the figures of each model, in milliseconds and bytes, and where they were measured.

    Args:
        models: as ``run --model`` takes them.
        ranks: how many processes, with one thread each.
        rounds: how often each step is timed.
    """
    found = {}
    for model in models:
        with tempfile.TemporaryDirectory(prefix="fullshard-bench-") as folder:
            given = (ranks, model, rounds, folder)
            multiprocessing.spawn(_run_rank, args=given, nprocs=ranks, join=True)
            found[model] = json.loads(Path(folder, "result.json").read_text())
    return {
        "kind": "optimizers",
        "ranks": ranks,
        "rounds": rounds,
        "machine": describe_machine(),
        "versions": describe_versions(),
        "models": found,
    }


def said_of_optimizers(result: dict[str, Any]) -> str:
    """Returns a table of what ``measure_optimizers`` found, in Markdown."""
    lines = [
        f"{result['ranks']} ranks, {result['machine']['cpu']}, {result['machine']['cores']} cores, "
        f"torch {result['versions']['torch']}; medians of {result['rounds']} rounds.",
        "",
        "| model | Muon, ms | gathering every matrix, ms | ratio | owner's Newton-Schulz, ms "
        "| ratio | 8-bit AdamW, ms | foreach AdamW, ms | ratio | state, of AdamW's |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, each in result["models"].items():
        muon, eight = each["muon_ms"], each["adamw8bit_ms"]
        lines.append(
            f"| {name} | {muon:.1f} | {each['gathering_ms']:.1f} "
            f"| {muon / each['gathering_ms']:.2f} | {each['newton_schulz_ms']:.1f} "
            f"| {muon / each['newton_schulz_ms']:.2f} "
            f"| {eight:.1f} | {each['adamw_ms']:.1f} | {eight / each['adamw_ms']:.2f} "
            f"| {each['adamw8bit_bytes'] / each['adamw_bytes']:.3f} |"
        )
    return "\n".join([*lines, ""])


# -- one rank -------------------------------------------------------------------------------------


def _run_rank(rank: int, ranks: int, model: str, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    measured = _Measured(model)
    contestants: dict[str, Callable[[], object]] = {
        "muon_ms": measured.muon.step,
        "gathering_ms": measured.gather_all,
        "newton_schulz_ms": measured.compute_owned,
        "adamw8bit_ms": measured.eight.step,
        "adamw_ms": measured.adamw.step,
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(_WARM + rounds):
        for name, step in contestants.items():
            taken = _slowest(step)
            if turn >= _WARM:
                times[name].append(taken)
    result: dict[str, float] = {name: statistics.median(each) for name, each in times.items()}
    result.update(measured.sizes())
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _slowest(step: Callable[[], object]) -> float:
    """Returns how long the slowest rank took, in milliseconds; all begin together."""
    dist.barrier()
    began = time.perf_counter()
    step()
    taken = torch.tensor([1000 * (time.perf_counter() - began)], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


@dataclass(frozen=True, slots=True)
class _Gathered:
    """A matrix of the comparison: its parts here, and its momentum."""

    data: torch.Tensor
    gradient: torch.Tensor
    average: torch.Tensor
    shape: tuple[int, int]


class _Measured:
    """The model of a rank, sharded, with gradients, and what steps it."""

    def __init__(self, model: str) -> None:
        workload = make_workload(model, Shape(rows=1, tokens=8))
        torch.manual_seed(0)
        net = workload.build()
        for unit in workload.units(net):
            fully_shard(unit)
        fully_shard(net)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for param in net.parameters():
            assert isinstance(param, DTensor), "it is sharded"
            local = _part_of(param)
            local.copy_(0.02 * torch.randn(local.shape, generator=generator))
            part = torch.randn(local.shape, generator=generator)
            param.grad = DTensor.from_local(
                part, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
            )
        self.net = net
        groups = partial(matrix_groups, net, adamw={"lr": 1e-4})
        self.muon = Muon(groups(), lr=1e-3)
        self.rest = torch.optim.AdamW(groups()[-1]["params"], lr=1e-4)
        self.eight = AdamW8bit(net.parameters(), lr=1e-4)
        self.adamw = torch.optim.AdamW(net.parameters(), lr=1e-4, foreach=True)
        numel = max(param.numel() for param in net.parameters())
        self._noise = torch.randn(numel, generator=generator).to(torch.bfloat16)
        self._matrices = [_gathered(param) for param in groups()[0]["params"]]

    def gather_all(self) -> None:
        """Muon with every matrix gathered, in bf16, and computed on every rank.

        All matrices in one launch, and each rank takes its rows of the result; the rest by AdamW.
        """
        self.rest.step()
        updates, specs = [], []
        for each in self._matrices:
            each.average.lerp_(each.gradient, 0.05)
            updates.append(each.gradient.lerp(each.average, 0.95).to(torch.bfloat16))
            specs.append(TensorSpec(shape=each.shape, dtype=torch.bfloat16))
        group = dist.group.WORLD
        assert group is not None, "it was made"
        for each, whole in zip(
            self._matrices, all_gather_tensors(updates, specs, group), strict=True
        ):
            result = orthogonalised(whole, COEFFICIENTS, 5, 1e-7)
            rows = -(-each.shape[0] // dist.get_world_size())
            mine = result[rows * dist.get_rank() :][: each.data.shape[0]]
            each.data.mul_(1 - 1e-4).add_(mine, alpha=-1e-3)

    def compute_owned(self) -> None:
        """The Newton-Schulz of the matrices that this rank owns, and nothing else."""
        for rows, columns in self.muon.owned_shapes:
            matrix = self._noise.narrow(0, 0, rows * columns).view(rows, columns)
            orthogonalised(matrix, COEFFICIENTS, 5, 1e-7)

    def sizes(self) -> dict[str, float]:
        """Bytes: of states over all ranks, and that a rank sends in a step of Muon."""
        log = EventLog()
        with observe(log):
            self.muon.step()
        sent = sum(event.nbytes for event in log.of(EventKind.ALL_TO_ALL))
        states = [_bytes_of(each) for each in (self.eight, self.adamw)]
        total = torch.tensor([*states, sent], dtype=torch.float64)
        dist.all_reduce(total)
        names = ("adamw8bit_bytes", "adamw_bytes", "muon_sent_bytes")
        matrices = sum(rows * columns for rows, columns in (m.shape for m in self._matrices))
        return {**dict(zip(names, total.tolist(), strict=True)), "matrix_elements": matrices}


def _gathered(param: nn.Parameter) -> _Gathered:
    assert isinstance(param, DTensor) and isinstance(param.grad, DTensor), "it is sharded"
    data, gradient = _part_of(param), _part_of(param.grad)
    rows, columns = param.shape
    return _Gathered(data, gradient, torch.zeros_like(gradient), (rows, columns))


def _bytes_of(optimizer: torch.optim.Optimizer) -> int:
    tensors = [each for state in optimizer.state.values() for each in state.values()]
    return sum(_part_of(each).nbytes for each in tensors)


def _part_of(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached

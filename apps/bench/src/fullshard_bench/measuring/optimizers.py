"""A step of optimizers, and of simpler computations, over ranks of this host.

Owns the measurement: Muon, compared with a step that gathers every matrix on every rank (written
    here), and with the owner's Newton-Schulz alone; SOAP, compared with the owner's rule alone,
    with old bases and with new ones; step and state of 8-bit AdamW, compared with AdamW.
    Contestants take turns in one run of one set of ranks, on equal gradients. Figures are medians
    of rounds; a round's is the
mean of steps in a row, from when the first rank began to when the last one ended.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
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
from fullshard.optim import SOAP, AdamW8bit, Muon, matrix_groups
from fullshard.optim.spi import COEFFICIENTS, new_state, orthogonalised, start, update_of
from fullshard.sharding import fully_shard
from fullshard_bench.launching.machine import describe_machine, describe_versions
from fullshard_bench.models.registry import make_workload
from fullshard_bench.models.workload import Shape

__all__ = ["measure_optimizers", "said_of_optimizers"]

_WARM = 2  # rounds that are not counted
_LEAST = 100.0  # milliseconds of steps in a row, so that how ranks begin is little of it
_FREQUENCY = 10  # steps of SOAP from one basis to the next
_NEVER = 10**9


def measure_optimizers(models: Sequence[str], ranks: int, rounds: int) -> dict[str, Any]:
    """Return the figures of each model, in milliseconds and bytes, and where they were measured.

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
    """Return tables of what ``measure_optimizers`` found, in Markdown."""
    head = (
        f"{result['ranks']} ranks, {result['machine']['cpu']}, {result['machine']['cores']} cores, "
        f"torch {result['versions']['torch']}; medians of {result['rounds']} rounds."
    )
    tables = [_table(columns, result["models"]) for columns in (_MUON, _SOAP, _EIGHT_BITS)]
    return "\n".join([head, *(line for table in tables for line in ("", *table)), ""])


@dataclass(frozen=True, slots=True)
class _Column:
    """A figure of each model in a table, or the ratio of two.

    Attributes:
        head: its name there.
        figure: that in the result.
        over: by which it is divided; "": by nothing.
        digits: after the point.
    """

    head: str
    figure: str
    over: str = ""
    digits: int = 1

    def of(self, figures: Mapping[str, float]) -> str:
        """Return a model's."""
        value = figures[self.figure] / (figures[self.over] if self.over else 1)
        return f"{value:.{self.digits}f}"


_MUON = (
    _Column("Muon, ms", "muon_ms"),
    _Column("gathering every matrix, ms", "gathering_ms"),
    _Column("ratio", "muon_ms", "gathering_ms", 2),
    _Column("owner's Newton-Schulz, ms", "newton_schulz_ms"),
    _Column("ratio", "muon_ms", "newton_schulz_ms", 2),
)
_SOAP = (
    _Column("SOAP, ms", "soap_ms"),
    _Column("owner's rule, ms", "soap_rule_ms"),
    _Column("ratio", "soap_ms", "soap_rule_ms", 2),
    _Column("with new bases, ms", "soap_basis_ms"),
    _Column(f"mean, a new basis every {_FREQUENCY} steps, ms", "soap_mean_ms"),
    _Column("foreach AdamW, ms", "adamw_ms"),
)
_EIGHT_BITS = (
    _Column("8-bit AdamW, ms", "adamw8bit_ms"),
    _Column("foreach AdamW, ms", "adamw_ms"),
    _Column("ratio", "adamw8bit_ms", "adamw_ms", 2),
    _Column("state, of AdamW's", "adamw8bit_bytes", "adamw_bytes", 3),
)


def _table(columns: Sequence[_Column], models: Mapping[str, Mapping[str, float]]) -> list[str]:
    rows = [["model", *[each.head for each in columns]], ["---"] * (1 + len(columns))]
    for name, found in models.items():
        steady, new = found["soap_ms"], found["soap_basis_ms"]
        figures = {**found, "soap_mean_ms": steady + (new - steady) / _FREQUENCY}
        rows.append([name, *[each.of(figures) for each in columns]])
    return [f"| {' | '.join(row)} |" for row in rows]


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
        "soap_ms": measured.soap.step,
        "soap_basis_ms": measured.soap_of_new_bases.step,
        "soap_rule_ms": measured.compute_soap,
        "adamw8bit_ms": measured.eight.step,
        "adamw_ms": measured.adamw.step,
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    in_a_row = dict.fromkeys(contestants, 1)
    for turn in range(_WARM + rounds):
        for name, step in contestants.items():
            taken = _span(step, in_a_row[name])
            if turn >= _WARM:
                times[name].append(taken)
            else:
                in_a_row[name] = max(1, round(_LEAST / taken))
    result: dict[str, float] = {name: statistics.median(each) for name, each in times.items()}
    result.update(measured.sizes())
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _span(step: Callable[[], object], in_a_row: int) -> float:
    """Return how long a step of all ranks takes, in milliseconds, the mean of some in a row.

    From when the first rank begins to when the last one ends: where ranks outnumber cores, the
    first ones may have ended a short step before others are given a core, and each rank's own time
    would leave that out. The clock is the host's, the same for all.
    """
    dist.barrier()
    began = time.monotonic()
    for _ in range(in_a_row):
        step()
    span = torch.tensor([-began, time.monotonic()], dtype=torch.float64)
    dist.all_reduce(span, dist.ReduceOp.MAX)
    return 1000 * float(span.sum()) / in_a_row


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
        by_soap = partial(matrix_groups, net, algorithm="soap")
        self.soap, self.soap_of_new_bases = (
            SOAP(by_soap(), lr=1e-3, precondition_frequency=frequency) for frequency in (_NEVER, 1)
        )
        self.eight = AdamW8bit(net.parameters(), lr=1e-4)
        self.adamw = torch.optim.AdamW(net.parameters(), lr=1e-4, foreach=True)
        numel = max(param.numel() for param in net.parameters())
        self._noise = torch.randn(numel, generator=generator).to(torch.bfloat16)
        self._matrices = [_gathered(param) for param in groups()[0]["params"]]
        self._soap_states: list[dict[str, torch.Tensor]] = []

    def gather_all(self) -> None:
        """Step Muon with every matrix gathered, in bf16, and computed on every rank.

        A single launch gathers the matrices. A rank takes its rows of the result, and AdamW steps
        the other parameters.
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
        """Run only the Newton-Schulz of the matrices that this rank owns."""
        for shape in self.muon.owned_shapes:
            orthogonalised(self._noise_of(shape), COEFFICIENTS, 5, 1e-7)

    def compute_soap(self) -> None:
        """SOAP's rule for the matrices that this rank owns, with the bases that there are."""
        options = self.soap.param_groups[0]
        shapes = self.soap.owned_shapes
        if not self._soap_states:
            for shape in shapes:
                state = new_state(*shape, options["max_precond_dim"], torch.device("cpu"))
                start(state, self._noise_of(shape).float(), options)
                self._soap_states.append(state)
        for shape, state in zip(shapes, self._soap_states, strict=True):
            update_of(state, self._noise_of(shape).float(), options, 1)

    def _noise_of(self, shape: tuple[int, int]) -> torch.Tensor:
        rows, columns = shape
        return self._noise.narrow(0, 0, rows * columns).view(rows, columns)

    def sizes(self) -> dict[str, float]:
        """Bytes: of states over all ranks, and that a rank sends in a step of Muon."""
        log = EventLog()
        with observe(log):
            self.muon.step()
        sent = sum(event.nbytes for event in log.of(EventKind.ALL_TO_ALL))
        states = [_bytes_of(each) for each in (self.eight, self.adamw)]
        total = torch.tensor([*states, sent, self.soap.owned_bytes], dtype=torch.float64)
        dist.all_reduce(total)
        names = ("adamw8bit_bytes", "adamw_bytes", "muon_sent_bytes", "soap_bytes")
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

"""The command `plan`: the memory of a model on meshes that are not there, a row for each choice.

Owns the product of choices, and its table. `fullshard.preflight.plan` plans each.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.policies import CPUOffloadPolicy, MixedPrecisionPolicy
from fullshard.preflight import Category, Plan, plan
from fullshard.sharding import fully_shard
from fullshard_bench.checkpointing import recompute_units
from fullshard_bench.errors import BenchError
from fullshard_bench.fsdp_options import fsdp_options
from fullshard_bench.meshes import parse_mesh
from fullshard_bench.models import make_workload
from fullshard_bench.settings import Settings
from fullshard_bench.training import make_optimizer
from fullshard_bench.workload import Shape, Workload

__all__ = ["Choices", "parse_bytes", "show_plans"]

_CPU = torch.device("cpu")
_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What is planned: the product of all of these.

    Attributes:
        settings: what all have in common.
        meshes: as `parse_mesh` reads them.
        dtypes: of computing.
        reshards: when parameters are freed after forward.
        checkpointings: whether units compute their activations again.
    """

    settings: Settings
    meshes: Sequence[str]
    dtypes: Sequence[str]
    reshards: Sequence[str]
    checkpointings: Sequence[bool]

    def each(self) -> Iterator[Settings]:
        """The settings of each choice, for one mesh."""
        for dtype, reshard, recompute in itertools.product(
            self.dtypes, self.reshards, self.checkpointings
        ):
            yield replace(self.settings, dtype=dtype, reshard=reshard, checkpointing=recompute)


def parse_bytes(text: str) -> int:
    """The bytes that `80GiB`, `512MiB` or a number mean.

    Raises:
        BenchError: it is none of these.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]iB|B|)", text)
    if match is None:
        raise BenchError(f"--budget {text!r}: write a size such as 80GiB or 512MiB")
    return int(float(match[1]) * _UNITS[match[2]])


def show_plans(choices: Choices, budget: int | None, console: Console) -> None:
    """Prints a row for each mesh and choice as soon as it is planned, then the best that fits.

    Raises:
        BenchError: a mesh or a model is none.
    """
    meshes = [parse_mesh(text) for text in choices.meshes]
    table = Table(title=f"{choices.settings.model}: memory of one rank", title_justify="left")
    for name in ("mesh", "dtype", "reshard", "recompute"):
        table.add_column(name)
    for name in ("peak", "parameters", "gradients", "optimizer", "activations", "other"):
        table.add_column(name, justify="right")
    table.add_column("" if budget is None else "fits")
    planned: list[tuple[Plan, Settings]] = []
    for mesh, settings in itertools.product(meshes, choices.each()):
        console.print(f"planning {mesh}, {_words(settings)} ...", highlight=False)
        found = _plan(settings, mesh.sizes)
        planned.append((found, settings))
        table.add_row(*_row(found, settings, budget))
    console.print(table)
    console.print(
        "Peak of tensors alive in a step, of the rank with the largest shards. An allocator keeps"
        " more; attention is the CPU's, whose memory does not grow with tokens squared."
    )
    if budget is not None:
        console.print(_best(planned, budget))


def _plan(settings: Settings, sizes: tuple[int, ...]) -> Plan:
    workload = make_workload(settings.model, Shape(rows=settings.rows, tokens=settings.tokens))
    return plan(
        partial(_build, workload),
        partial(workload.batch, torch.Generator()),
        workload.loss,
        mesh=sizes if len(sizes) == 2 else sizes[0],
        shard=partial(_shard, workload, settings),
        optimizer=lambda params: make_optimizer(list(params)),
    )


def _build(workload: Workload) -> nn.Module:
    with torch.device("meta" if workload.on_meta else "cpu"):
        return workload.build()


def _shard(workload: Workload, settings: Settings, model: nn.Module, mesh: DeviceMesh) -> None:
    units = list(workload.units(model))
    if settings.checkpointing:
        recompute_units(units)
    options = fsdp_options(settings, _CPU, MixedPrecisionPolicy, CPUOffloadPolicy)
    for unit in (*units, model):
        fully_shard(unit, mesh=mesh, **options)


def _words(settings: Settings) -> str:
    recompute = "recompute" if settings.checkpointing else "keep activations"
    return f"{settings.dtype}, reshard {settings.reshard}, {recompute}"


def _row(found: Plan, settings: Settings, budget: int | None) -> list[str]:
    parts = found.categories
    named = (
        parts[Category.SHARDS] + parts[Category.GATHERED],
        parts[Category.GRADIENTS] + parts[Category.UNREDUCED],
        parts[Category.OPTIMIZER_STATE],
        parts[Category.ACTIVATIONS],
    )
    fits = "" if budget is None else "yes" if found.fits(budget) else "no"
    recompute = "yes" if settings.checkpointing else "no"
    sizes = (found.peak, *named, found.peak - sum(named))
    return [
        found.name, settings.dtype, settings.reshard, recompute, *map(_size, sizes), fits
    ]  # fmt: skip


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def _best(planned: list[tuple[Plan, Settings]], budget: int) -> str:
    """The first of the fewest ranks that fits: choices come cheapest first."""
    for found, settings in planned:
        if found.fits(budget):
            return f"The first that fits {_size(budget)}: {found.name} ranks, {_words(settings)}."
    least = min(found.peak for found, _ in planned)
    return f"None fits {_size(budget)}; the least is {_size(least)}."

"""The choices that a table has: those that options name, or a set that each changes one thing.

Owns the text form of choices. `fullshard.preflight.Choice` documents each.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from fullshard.preflight import DEVICES, Choice
from fullshard.sharding import ShardingPlacements
from fullshard_bench.contestants.fsdp_options import parse_reshard
from fullshard_bench.errors import BenchError
from fullshard_bench.settings import DTYPES, Settings

__all__ = ["add_plan", "choices_of"]

# On a mesh that replicates, stage 3 is what the mesh says.
_ZERO = {1: ShardingPlacements.zero(1), 2: ShardingPlacements.zero(2), 3: None}
_NAMED = (
    "dtype",
    "zero",
    "reshard",
    "prefetch",
    "group",
    "checkpointing",
    "offload",
    "micro_batches",
)


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command `plan`."""
    default = Settings()
    parser.add_argument("--mesh", nargs="+", required=True, metavar="N|MxN", help="ranks")
    parser.add_argument("--model", default=default.model, help="as for run")
    parser.add_argument("--rows", type=int, default=4, help="of a rank's batch (4)")
    parser.add_argument("--tokens", type=int, default=2048, help="of a row (2048)")
    parser.add_argument("--budget", default="", metavar="80GiB", help="of one device")
    parser.add_argument(
        "--device", default="", metavar="NAME",
        help=f"{', '.join(DEVICES)}, for time; here: this machine, measured; or cpu",
    )  # fmt: skip
    parser.add_argument(
        "--costs", type=Path, metavar="FILE", help="keeps what --device here measured"
    )
    parser.add_argument(
        "--out", type=Path, metavar="STEM",
        help="write STEM.md, STEM.png, and of the best that fits STEM_best.png and a trace",
    )  # fmt: skip
    parser.add_argument("--picture", type=Path, metavar="FILE", help="of the best that fits")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="of its step, for Perfetto")
    _add_choices(parser)
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes that plan"
    )


def _add_choices(parser: argparse.ArgumentParser) -> None:
    """Add the options, of which several values give several choices."""
    how = parser.add_argument_group(
        "choices", "several values give their product; without any, one thing at a time is changed"
    )
    how.add_argument("--dtype", nargs="+", choices=DTYPES, help="of computing (bfloat16)")
    how.add_argument("--reduce-dtype", choices=DTYPES, default=Settings().reduce_dtype)
    how.add_argument("--zero", nargs="+", type=int, choices=_ZERO, help="stage: ZeRO-1, 2 or 3")
    how.add_argument("--reshard", nargs="+", metavar="WHEN", help="default, always, never or N")
    how.add_argument("--prefetch", nargs="+", type=int, metavar="N", help="units ahead, or -1")
    how.add_argument("--group", nargs="+", type=int, metavar="N", help="units in one gather")
    how.add_argument("--checkpointing", nargs="+", choices=("no", "yes"), help="recompute")
    how.add_argument("--offload", nargs="*", choices=("no", "yes"), help="shards on the host")
    how.add_argument("--micro-batches", nargs="+", type=int, metavar="N", help="parts of a batch")


def choices_of(options: argparse.Namespace) -> list[Choice]:
    """The product of what was given, the first of each first; else the set.

    Raises:
        BenchError: a value makes no sense.
    """
    reduced = getattr(torch, options.reduce_dtype)
    if all(getattr(options, name) is None for name in _NAMED):
        return list(
            _one_at_a_time(Choice(dtype=torch.bfloat16, reduce_dtype=reduced), options.rows)
        )
    return list(_product(options, reduced))


def _one_at_a_time(base: Choice, rows: int) -> Iterator[Choice]:
    """The usual choice, and variants with one change."""
    yield base
    yield replace(base, placements=_ZERO[2])
    yield replace(base, placements=_ZERO[1])
    yield replace(base, reshard=False)
    yield replace(base, recompute=True)
    yield replace(base, recompute=True, reshard=False)
    yield replace(base, prefetch=2)
    yield replace(base, group=2)
    if rows % 2 == 0:
        yield replace(base, micro_batches=2)
    yield replace(base, offload=True)
    yield replace(base, dtype=None, reduce_dtype=None)


def _product(options: argparse.Namespace, reduced: torch.dtype) -> Iterator[Choice]:
    for (
        micro_batches,
        offload,
        recompute,
        group,
        prefetch,
        reshard,
        zero,
        dtype,
    ) in itertools.product(
        options.micro_batches or [1],
        ["no"] if options.offload is None else options.offload or ["yes"],
        options.checkpointing or ["no"],
        options.group or [1],
        options.prefetch or [-1],
        options.reshard or ["default"],
        options.zero or [3],
        options.dtype or ["bfloat16"],
    ):
        try:
            yield Choice(
                reshard=parse_reshard(reshard),
                prefetch=None if prefetch < 0 else prefetch,
                group=group,
                recompute=recompute == "yes",
                offload=offload == "yes",
                dtype=None if dtype == "float32" else getattr(torch, dtype),
                reduce_dtype=None if dtype == "float32" else reduced,
                micro_batches=micro_batches,
                placements=_ZERO[zero],
            )
        except ValueError as error:
            raise BenchError(f"--{str(error).replace('_', '-', 1)}") from None

"""Runs in tables for a terminal: one row per run, and of a single run one row per rank."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from fullshard.cli.running.runs import Run

__all__ = ["hints", "ranks_table", "runs_table", "size"]

_NONE = "-"


def runs_table(runs: Sequence[Run]) -> Table:
    """Return a table with a row for each run."""
    table = Table("run", title="Runs", title_justify="left")
    for head in ("ranks", "steps", "ms a step", "slowest", "first loss", "last loss", "held out"):
        table.add_column(head, justify="right")
    table.add_column("peak memory", justify="right")
    for run in runs:
        told = run.value()
        table.add_row(
            run.name,
            str(run.world or _NONE),
            str(told["steps"]),
            _ms(run.step),
            _NONE if run.slowest is None else f"rank {run.slowest}",
            *(_loss(told[name]) for name in ("first_loss", "last_loss", "held_out_loss")),
            _NONE if told["peak_memory"] is None else size(told["peak_memory"]),
        )
    return table


def ranks_table(run: Run) -> Table:
    """Return a table with a row for each rank; bytes are those of a step."""
    table = Table("rank", "host", title="Ranks, bytes of one step", title_justify="left")
    for head in ("ms a step", "gathers", "gathered", "reduced", "peak memory"):
        table.add_column(head, justify="right")
    table.add_column("ended")
    for each in run.ranks:
        steps = max(each.steps, 1)
        table.add_row(
            str(each.rank),
            each.host,
            _ms(each.step),
            f"{each.count_of('all_gather') / steps:.0f}",
            size(each.bytes_of("all_gather") // steps),
            size(each.bytes_of("reduce_scatter") // steps),
            size(each.peak_memory),
            each.error or "well",
        )
    return table


def hints(runs: Sequence[Run]) -> list[str]:
    """Return what to do about runs whose program left no losses, or sharded nothing."""
    found = []
    silent = [run.name for run in runs if run.value()["first_loss"] is None]
    if silent:
        found.append(
            f"no losses of {', '.join(silent)}: on rank 0, append a line such as "
            f'{{"step": 1, "loss": 0.5}} for each step to {silent[0]}/metrics.jsonl'
        )
    whole = [run.name for run in runs if run.world > 1 and not _gathers(run)]
    if whole:
        found.append(f"no rank of {', '.join(whole)} gathered a parameter: was a model sharded?")
    return found


def _gathers(run: Run) -> bool:
    return any(each.count_of("all_gather") for each in run.ranks)


def size(nbytes: int) -> str:
    """Return bytes as text."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def _ms(seconds: float | None) -> str:
    return _NONE if seconds is None else f"{1000 * seconds:.1f}"


def _loss(loss: float | None) -> str:
    return _NONE if loss is None else f"{loss:.4f}"

"""Checkpoints in the memory of this host: a table of them, and their removal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from fullshard.checkpoint import MemoryRun

__all__ = ["memory_table", "remove_runs"]


def memory_table(runs: Sequence[MemoryRun]) -> Table | str:
    """Return a table of the runs; a sentence if there is none."""
    if not runs:
        return "no run has checkpoints in the memory of this host"
    table = Table("run", "steps", "MiB", "processes", "folder")
    for run in runs:
        table.add_row(
            run.name,
            ", ".join(map(str, run.steps)) or "none",
            f"{run.nbytes / 2**20:.0f}",
            ", ".join(map(str, run.process_ids)) or "none: it ended",
            str(run.folder),
        )
    return table


def remove_runs(runs: Sequence[MemoryRun], names: Sequence[str]) -> None:
    """Remove the runs of these names.

    Raises:
        RuntimeError: if there is no such run, or a process uses it.
    """
    found = {run.name: run for run in runs}
    missing = [name for name in names if name not in found]
    if missing:
        there = ", ".join(found) or "none"
        raise RuntimeError(f"no run {missing[0]} has memory on this host; there are: {there}")
    for name in names:
        found[name].remove()

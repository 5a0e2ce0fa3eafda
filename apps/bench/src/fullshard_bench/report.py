"""A result as Markdown: the machine, a table for each mesh, pictures, definitions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fullshard_bench.result import Result, RunResult
from fullshard_bench.rows import heads_of, notes_of, rows_of, title_of, verified_of

__all__ = ["markdown_of", "markdown_table", "write_report"]


def write_report(
    result: Result, path: Path, pictures: Sequence[Path], extra: Sequence[str] = ()
) -> None:
    """Write `markdown_of` next to the pictures."""
    path.write_text(markdown_of(result, pictures, extra), encoding="utf-8")


def markdown_of(result: Result, pictures: Sequence[Path], extra: Sequence[str] = ()) -> str:
    """The report; pictures are linked by their names; `extra` lines come before the tables."""
    machine = result.machine
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    lines = [
        "# Benchmark",
        "",
        f"{result.created}: {machine['cpu']}, {machine['cores']} core(s),"
        f" {machine['memory_gib']} GiB, {machine['system']}, {gpus}; {versions};"
        f" {result.seconds:.0f} seconds in all.",
        "",
        "```sh",
        result.command,
        "```",
        "",
        *extra,
    ]
    lines += [line for path in pictures for line in (f"![{path.stem}]({path.name})", "")]
    for run in result.runs:
        lines += _run(run)
    lines += ["## What the figures mean", ""]
    lines += [f"- {definition}." for definition in result.definitions]
    return "\n".join(lines) + "\n"


def _run(run: RunResult) -> list[str]:
    settings = run.settings
    per_host = settings.get("ranks_per_host", 1)  # older results have one
    lines = [
        f"## {run.name}",
        "",
        f"{run.parameters:,} parameters; {run.items_per_rank} {run.item} per rank and step;"
        f" {settings['device']}, {settings['dtype']}; {settings['steps']} rounds"
        + (f"; links of {settings['network']}" if settings["network"] else "")
        + (f"; {per_host} ranks on each host" if per_host > 1 else "")
        + ".",
        "",
    ]
    for point in run.points:
        lines += [f"### {title_of(run, point)}", ""]
        lines += markdown_table(heads_of(point), rows_of(point))
        lines += [f"- verify: {line}" for line in verified_of(point.entries)]
        lines += [f"- {note}" for note in notes_of(point.entries)]
        lines.append("")
    return lines


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows under heads as lines of Markdown."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]

"""The plans as tables, on the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from fullshard.preflight import Category
from fullshard_bench.planning.rows import Planned
from fullshard_bench.planning.scaling import Scaled

__all__ = ["Grid", "rows_table", "scaling_tables", "size"]

_LEFT = 2  # columns of words: what the row is about


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table: its title, the heads of its columns, and its cells."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    def to_terminal(self) -> Table:
        """As a terminal shows it."""
        table = Table(title=self.title, title_justify="left")
        for place, head in enumerate(self.heads):
            table.add_column(head, justify="left" if place < _LEFT else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table

    def to_markdown(self) -> str:
        """Return the text for a Markdown file."""
        rule = ["---" if place < _LEFT else "---:" for place in range(len(self.heads))]
        lines = [f"| {' | '.join(row)} |" for row in (self.heads, rule, *self.rows)]
        return "\n".join([f"### {self.title}", "", *lines])


def size(nbytes: int) -> str:
    """Bytes as people read them."""
    if nbytes >= 2**30:
        return f"{nbytes / 2**30:.2f} GiB"
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**18 else f"{nbytes / 2**10:.1f} KiB"


def rows_table(title: str, rows: Sequence[Planned], budget: int | None, item: str) -> Grid:
    """A row for each mesh and choice."""
    timed = rows[0].time is not None
    memory = ["peak", "parameters", "gradients", "optimizer", "activations", "other"]
    heads = ["mesh", "choices", *memory]
    if timed:
        heads = ["mesh", "choices", "peak", "step", "exposed", "host-bound", "MFU"]
        heads.append(f"{item}/s/device")
    hosts = any(row.host for row in rows)
    heads += (["host"] if hosts else []) + (["fits"] if budget is not None else [])
    cells = []
    for row in rows:
        made = [str(row.job.mesh), str(row.job.choice), size(row.peak)]
        made += _times(row) if timed else list(map(size, _parts(row)))
        made += [size(row.host)] if hosts else []
        made += [] if budget is None else ["yes" if row.peak <= budget else "no"]
        cells.append(made)
    return Grid(title=title, heads=heads, rows=cells)


def _times(row: Planned) -> list[str]:
    time = row.time
    assert time is not None, "all rows are of one device"
    return [
        f"{1e3 * time.seconds:.1f} ms",
        f"{1e3 * time.exposed:.1f} ms",
        f"{1e3 * time.host_bound:.1f} ms",
        f"{100 * time.utilisation:.1f} %",
        f"{row.speed:.0f}",
    ]


def _parts(row: Planned) -> tuple[int, ...]:
    """The contents of the peak in the columns of the table, and the rest."""
    parts = row.categories
    named = (
        parts[Category.SHARDS] + parts[Category.GATHERED],
        parts[Category.GRADIENTS] + parts[Category.UNREDUCED],
        parts[Category.OPTIMIZER_STATE],
        parts[Category.ACTIVATIONS],
    )
    return (*named, row.peak - sum(named))


def scaling_tables(curve: Sequence[Scaled], item: str) -> list[Grid]:
    """Weak scaling, and strong scaling."""
    last = curve[-1].row
    about = ["mesh", "best choice", "ranks"]
    whole = last.items * last.job.mesh.ranks
    weak = Grid(
        title=f"Weak scaling: {last.items} {item} on each rank",
        heads=[
            "mesh",
            "best choice",
            "ranks",
            "step",
            f"{item}/s",
            f"{item}/s/device",
            "efficiency",
        ],
        rows=[
            [
                str(each.row.job.mesh),
                str(each.row.job.choice),
                str(each.row.job.mesh.ranks),
                f"{1e3 * each.row.time.seconds:.1f} ms" if each.row.time else "",
                f"{each.weak:,.0f}",
                f"{each.row.speed:,.0f}",
                f"{100 * each.weak_efficiency:.0f} %",
            ]
            for each in curve
        ],
    )
    strong = Grid(
        title=f"Strong scaling: {whole:,} {item} on all ranks together",
        heads=[*about, "micro-batches", "step", f"{item}/s", "efficiency"],
        rows=[
            [
                str(each.row.job.mesh),
                str(each.row.job.choice),
                str(each.row.job.mesh.ranks),
                f"{each.micro_batches:.0f}",
                f"{each.strong:.2f} s",
                f"{whole / each.strong:,.0f}",
                f"{100 * each.strong_efficiency:.0f} %",
            ]
            for each in curve
        ],
    )
    return [weak, strong]

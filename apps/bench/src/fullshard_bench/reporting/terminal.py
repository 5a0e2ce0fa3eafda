"""The output for a person during the run, and at the end: progress and tables, on the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import TracebackType

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from fullshard_bench.records.result import Point, RunResult
from fullshard_bench.reporting.bars import Verdict
from fullshard_bench.reporting.format import as_ratio
from fullshard_bench.reporting.rows import heads_of, notes_of, rows_of, title_of, verified_of

__all__ = ["ProgressBar", "print_count", "print_point", "print_table", "print_verdicts"]


_BAD = ("WRONG", "FAILED", "not met", "inconclusive", "!", "?")


class ProgressBar:
    """Context that shows a bar over all measurements and the phase of the present one."""

    def __init__(self, total: int, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            speed_estimate_period=600,  # of all that was measured: measurements differ in length
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._total = total
        self._task: TaskID = self._progress.add_task("", total=total)
        self._done = 0
        self._title = ""

    def __enter__(self) -> ProgressBar:
        """Start to show."""
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop to show."""
        self._progress.stop()

    def begin(self, title: str) -> None:
        """Show that a measurement begins."""
        self._title = title
        self._progress.update(self._task, description=title)

    def tell(self, what: str, done: int, of: int) -> None:
        """The present action of the measurement; `done` `of` how many rounds, if it is timing."""
        part = 0.2 + 0.8 * done / of if of else 0.1
        rounds = f" {done}/{of}" if of else ""
        self._progress.update(
            self._task,
            completed=self._done + part,
            description=f"{self._title}: {what}{rounds}",
        )

    def end(self) -> None:
        """The measurement is done."""
        self._done += 1
        self._progress.update(self._task, completed=self._done)


def print_point(console: Console, run: RunResult, point: Point) -> None:
    """Print one point as a table, then the verdicts of verify, and why a row is not ranked."""
    heads, rows = heads_of(point), rows_of(point)
    # On its side: a terminal is narrow, and there are more figures than contestants.
    columns = tuple(" ".join(filter(None, row[:2])) for row in rows)
    turned = [[head, *(row[i] for row in rows)] for i, head in enumerate(heads) if i > 1]
    print_table(console, title_of(run, point), ("", *columns), turned)
    for line in verified_of(point.entries):
        console.print(f"  verify: {line}", highlight=False, markup=False)
    for note in notes_of(point.entries):
        console.print(f"  {note}", style="bold red", highlight=False, markup=False)


def print_verdicts(console: Console, verdicts: Sequence[Verdict], told: set[str]) -> None:
    """Print a line for each verdict whose bar is not among those `told`, and add it to them."""
    for each in verdicts:
        if each.bar.what not in told:
            style = "bold red" if each.word in _BAD else "green"
            line = f" {each.bar.what}: {as_ratio(each.found)}, bar {each.bar.limit:g}"
            console.print(Text(f"{each.word:<12}", style).append(line, "default"), soft_wrap=True)
            told.add(each.bar.what)


def print_count(console: Console, verdicts: Sequence[Verdict], seconds: float) -> None:
    """Print how many bars came out how, and where more is measured."""
    counts = Counter(each.word for each in verdicts)
    words = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    console.print(
        f"{words or 'no bar was measured'}, in {seconds:.0f} s. Ratios are to torch's"
        " fully_shard, or as named, with their 90 % intervals; nox -s bench measures all bars,"
        " with narrower ones.",
        highlight=False,
        soft_wrap=True,
    )


def print_table(
    console: Console, title: str, heads: tuple[str, ...], rows: list[list[str]]
) -> None:
    """Print rows under heads: the first column to the left, others to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(f"[bold red]{each}[/]" if each in _BAD else each for each in row))
    console.print(table)

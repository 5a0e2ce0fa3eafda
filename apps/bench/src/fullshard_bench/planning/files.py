"""The files of the command `plan`: tables and curves; of the best that fits a picture and a trace.

Owns their names, and the error for a wrong name before anything is planned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fullshard.preflight import Plan
from fullshard_bench.errors import BenchError
from fullshard_bench.planning.rows import Planned, plan_whole

__all__ = ["Files"]

_PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, kw_only=True)
class Files:
    """Which files are written.

    Attributes:
        stem: tables as `stem.md`, curves as `stem.png`, of the best that fits `stem_best.png` and
            `stem_best.json`; None for none of them.
        picture: of the best that fits, memory and streams; None for none.
        trace: its step, as a Chrome trace; None for none.
    """

    stem: Path | None = None
    picture: Path | None = None
    trace: Path | None = None

    def check(self, *, timed: bool) -> None:
        """Raise what can be known before anything is planned.

        Args:
            timed: whether plans have time.

        Raises:
            BenchError: a file has no folder, a picture another ending, or a trace no time.
        """
        for name, path in (("picture", self.picture), ("trace", self.trace)):
            if path is not None and not path.parent.is_dir():
                raise BenchError(f"--{name} {path}: there is no folder {path.parent}")
        if self.picture is not None and self.picture.suffix not in _PICTURES:
            raise BenchError(f"--picture {self.picture}: must end in {', '.join(_PICTURES)}")
        if self.trace is not None and not timed:
            raise BenchError("--trace is of a step in time: give --device a name, or here")

    def write(
        self,
        best: Planned | None,
        budget: int | None,
        texts: Sequence[str],
        draw: Callable[[Path], None],
    ) -> list[Path]:
        """Write them; the best that fits is planned once more, with all that a row leaves out.

        Args:
            best: of the rows; None if none fits.
            budget: bytes, for a line in the memory picture.
            texts: tables and text, as Markdown.
            draw: draws the curves into a file.

        Returns:
            what was written.

        Raises:
            BenchError: a file cannot be written.
        """
        if not (self.stem or self.picture or self.trace):
            return []
        try:
            whole = None if best is None else plan_whole(best.job)
            written = [] if whole is None else self._write_best(whole, budget)
            return written if self.stem is None else self._write_tables(texts, whole, written, draw)
        except OSError as error:
            raise BenchError(f"{error.filename}: {error.strerror or error}") from error

    def _named(self, ending: str) -> Path | None:
        return None if self.stem is None else self.stem.with_name(f"{self.stem.name}{ending}")

    def _write_best(self, whole: Plan, budget: int | None) -> list[Path]:
        if self.stem is not None:
            self.stem.parent.mkdir(parents=True, exist_ok=True)
        pictures = [each for each in (self.picture, self._named("_best.png")) if each is not None]
        traces = [each for each in (self.trace, self._named("_best.json")) if each is not None]
        for path in pictures:
            whole.draw(path, budget=budget)
        if whole.time is None:
            return pictures
        for path in traces:
            whole.time.save(path)
        return [*pictures, *traces]

    def _write_tables(
        self,
        texts: Sequence[str],
        whole: Plan | None,
        drawn: Sequence[Path],
        draw: Callable[[Path], None],
    ) -> list[Path]:
        table, curves = self._named(".md"), self._named(".png")
        assert table is not None and curves is not None, "there is a stem"
        draw(curves)
        said = list(texts) if whole is None else [*texts, f"```text\n{whole}\n```"]
        best = self._named("_best.png")
        shown = [curves, *([best] if best is not None and best in drawn else [])]
        said += [f"![{path.stem}]({path.name})" for path in shown]
        table.write_text("\n\n".join(said) + "\n")
        return [table, curves, *drawn]

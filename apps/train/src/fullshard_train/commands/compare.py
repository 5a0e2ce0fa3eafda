"""Compare several runs: held-out loss at equal steps and at equal time.

Owns the table and the picture. Runs that differ in the seed alone are one line, their mean. Refuses
to train, and to guess why runs differ.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard_train.errors import TrainError
from fullshard_train.reporting.metrics import read_metrics
from fullshard_train.reporting.run_folder import RunFolder
from fullshard_train.settings.config import Config, load_config

__all__ = ["Compared", "compare_runs", "write_comparison"]

_WARM = 10  # steps whose time is not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Runs that differ in the seed alone.

    Attributes:
        name: the optimizer and its rate, and what travels, if that is narrower.
        seeds: of the runs.
        steps: at which held-out loss was measured.
        losses: of each run, as many as ``steps``.
        seconds: of one step, on average.
    """

    name: str
    seeds: tuple[int, ...]
    steps: tuple[int, ...]
    losses: tuple[tuple[float, ...], ...]
    seconds: float

    @property
    def mean(self) -> tuple[float, ...]:
        """Held-out loss, the mean over runs."""
        return tuple([statistics.fmean(each) for each in zip(*self.losses, strict=True)])

    @property
    def spread(self) -> float:
        """How far the last held-out losses of its runs are apart."""
        ends = [losses[-1] for losses in self.losses]
        return max(ends) - min(ends)

    def beside(self, first: Compared) -> list[float]:
        """How much more its last loss is than that of ``first``, by seed: 0.01 is 1 % more."""
        others = {seed: losses[-1] for seed, losses in zip(first.seeds, first.losses, strict=True)}
        both = zip(self.seeds, self.losses, strict=True)
        return [losses[-1] / others[seed] - 1 for seed, losses in both if seed in others]

    def at(self, step: float) -> float:
        """Held-out loss at ``step``, on the line between the evaluations around it.

        Of what ended before, that at its end; before the first evaluation, that of the first.
        """
        points = list(zip(self.steps, self.mean, strict=True))
        for (low, before), (high, after) in itertools.pairwise(points):
            if low <= step <= high:
                return before + (after - before) * (step - low) / (high - low)
        return points[0][1] if step < points[0][0] else points[-1][1]

    def to_dict(self) -> dict[str, Any]:
        """Return all figures, for a record."""
        return {
            "name": self.name,
            "seeds": self.seeds,
            "steps": self.steps,
            "held_out_losses": self.losses,
            "seconds_per_step": self.seconds,
        }


def compare_runs(runs: Sequence[Path], timed: Sequence[Path]) -> list[Compared]:
    """Return what each kind of run has learned, and how long its steps take.

    Args:
        runs: folders of runs.
        timed: folders of other runs of the same kinds, perhaps shorter, on a quiet machine, whose
            steps' times count instead; where there is none of a kind, its own do.

    Raises:
        TrainError: if a folder holds no run, or runs of one kind were evaluated at other steps.
    """
    if not runs:
        raise TrainError("compare: name at least one run's folder")
    clocks: dict[str, list[float]] = {}
    for folder in timed:
        clocks.setdefault(_name(_config(folder)), []).append(_seconds(folder))
    kinds: dict[tuple[str, int], list[Path]] = {}
    for folder in runs:
        config = _config(folder)
        kinds.setdefault((_name(config), config.train.steps), []).append(folder)
    found = []
    for (name, _), folders in kinds.items():
        curves = [_held_out(folder) for folder in folders]
        steps = tuple(curves[0])
        if any(tuple(curve) != steps for curve in curves):
            raise TrainError(f"compare: runs of {name} were evaluated at other steps")
        found.append(
            Compared(
                name=name,
                seeds=tuple([_config(folder).train.seed for folder in folders]),
                steps=steps,
                losses=tuple([tuple(curve.values()) for curve in curves]),
                seconds=statistics.fmean(clocks.get(name) or map(_seconds, folders)),
            )
        )
    return found


def _config(folder: Path) -> Config:
    return load_config([RunFolder(root=folder).config], [])


def _name(config: Config) -> str:
    name = f"{config.optim.optimizer} {config.optim.learning_rate:g}"
    wire = config.parallel.wire_dtype
    return name if wire == "as computed" else f"{name}, {wire} on the wire"


def _records(folder: Path, kind: str) -> list[dict[str, Any]]:
    path = RunFolder(root=folder).metrics
    found = [dict(record) for record in read_metrics(path) if record["kind"] == kind]
    if not found:
        raise TrainError(f"compare: {path} has no record of kind {kind!r}")
    return found


def _held_out(folder: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in _records(folder, "held_out")}


def _seconds(folder: Path) -> float:
    """Seconds of a step of a run, on average: without its first ones, evaluations, checkpoints."""
    pauses = {
        record["step"]
        for record in read_metrics(RunFolder(root=folder).metrics)
        if record["kind"] != "train"
    }
    steps = [each for each in _records(folder, "train") if each["step"] > _WARM]
    taken = [
        (after["seconds"] - before["seconds"]) / (after["step"] - before["step"])
        for before, after in itertools.pairwise(steps)
        if not any(before["step"] <= pause < after["step"] for pause in pauses)
    ]
    if not taken:
        raise TrainError(f"compare: {folder} has too few steps to tell what one takes")
    return statistics.fmean(taken)


def write_comparison(found: Sequence[Compared], stem: Path, *, times: bool = True) -> str:
    """Write ``stem``.json, .md and .png; return the table.

    Equal time is that of all steps of the first kind of run. ``times``: False leaves time out, as
    of runs on a machine that did other things, too.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    table = _table(found) if times else _table_of_steps(found)
    runs = [each.to_dict() for each in found]
    if not times:
        for each in runs:
            del each["seconds_per_step"]
    record = {"kind": "held-out losses", "runs": runs}
    stem.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    stem.with_suffix(".md").write_text(table, encoding="utf-8")
    _draw(found, stem.with_suffix(".png"), times=times)
    return table


def _table_of_steps(found: Sequence[Compared]) -> str:
    lines = [
        "Held-out loss, the mean over seeds. Beside the first is how much more it is than that of",
        "the first run of the same seed: the mean, and from the least to the most.",
        "",
        "| optimizer, rate | seeds | steps | held-out loss | spread over seeds "
        "| beside the first |",
        "|---|---|---|---|---|---|",
    ]
    for each in found:
        seeds = ", ".join(map(str, each.seeds))
        lines.append(
            f"| {each.name} | {seeds} | {each.steps[-1]} | {each.mean[-1]:.4f} "
            f"| {each.spread:.4f} | {_percent(each.beside(found[0]))} |"
        )
    return "\n".join([*lines, ""])


def _percent(more: Sequence[float]) -> str:
    if not more:
        return "no seed in common"
    mean, low, high = (100 * each for each in (statistics.fmean(more), min(more), max(more)))
    return f"{mean:+.2f} % ({low:+.2f} to {high:+.2f})"


def _table(found: Sequence[Compared]) -> str:
    first = found[0]
    budget = first.steps[-1] * first.seconds
    lines = [
        f"Held-out loss, the mean over seeds. Equal time is the {budget:.1f} s of {first.name}'s "
        f"{first.steps[-1]} steps; rates had not come to their end there where steps are left.",
        "",
        "| optimizer, rate | seeds | steps | held-out loss | spread over seeds | ms a step "
        "| steps in equal time | held-out loss then |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in found:
        affordable = min(budget / each.seconds, each.steps[-1])
        lines.append(
            f"| {each.name} | {', '.join(map(str, each.seeds))} | {each.steps[-1]} "
            f"| {each.mean[-1]:.4f} | {each.spread:.4f} | {1000 * each.seconds:.0f} "
            f"| {affordable:.0f} | {each.at(affordable):.4f} |"
        )
    return "\n".join([*lines, ""])


def _draw(found: Sequence[Compared], path: Path, *, times: bool) -> None:
    # Imported here: it takes seconds.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    labels = ("steps", "seconds of training") if times else ("steps",)
    figure = Figure(figsize=(5 * len(labels) + 1, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(labels), sharey=True, squeeze=False)[0]
    for each in found:
        seconds = [step * each.seconds for step in each.steps]
        for axes, across in zip(panels, (each.steps, seconds), strict=False):
            axes.plot(across, each.mean, "o-", markersize=3, label=each.name)
    for axes, label in zip(panels, labels, strict=True):
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("held-out loss, mean over seeds")
    panels[0].legend()
    figure.savefig(path, dpi=110)

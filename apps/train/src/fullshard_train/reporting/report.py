"""What a run shows for itself: a picture, a sample, the final numbers, and where they all are.

Owns their form. Refuses to compute: losses come from the trainer, baselines and sample from the
task.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard_train.reporting.metrics import finite, read_metrics
from fullshard_train.reporting.run_folder import RunFolder
from fullshard_train.task import Evaluation, Measure, Task

__all__ = ["Result", "draw_curve", "summary", "write_report"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a run ended: what `task` learned, and what its model says.

    `export` is the file of its full weights, if there is one.
    """

    task: Task
    held_out: Evaluation
    baselines: Mapping[str, float]
    sample: str
    checkpoint: Path
    export: Path | None
    steps: int


def write_report(folder: RunFolder, result: Result) -> str:
    """Writes sample, numbers and picture into the run's folder; returns the summary to print."""
    task = result.task
    folder.sample.write_text(result.sample, encoding="utf-8")
    numbers = {
        "held_out_loss": result.held_out.loss,
        "held_out_accuracy": result.held_out.accuracy,
        "judged_by": task.measure.value,
        "baselines": dict(result.baselines),
        "unit": task.unit,
        "steps": result.steps,
        "checkpoint": str(result.checkpoint),
    }
    text = json.dumps(finite(numbers), indent=1, allow_nan=False)
    folder.result.write_text(text + "\n", encoding="utf-8")
    draw_curve(folder.curve, read_metrics(folder.metrics), task, result.baselines)
    return summary(folder, result)


def summary(folder: RunFolder, result: Result) -> str:
    """The lines that rank 0 prints at the end."""
    task, held_out = result.task, result.held_out
    by_loss = task.measure is Measure.LOSS
    unit = task.unit if by_loss else f"of the {task.item}"
    found = {
        task.measure.value: held_out.loss if by_loss else held_out.accuracy,
        **result.baselines,
    }
    width = max(map(len, found))
    numbers = [f"  {name:<{width}}  {value:.4f} {unit}" for name, value in found.items()]
    if not by_loss:
        numbers.append(f"  {Measure.LOSS.value:<{width}}  {held_out.loss:.4f} {task.unit}")
    files = {
        "checkpoint": result.checkpoint,
        "weights": result.export,
        "loss curve": folder.curve,
        "metrics": folder.metrics,
        "sample": folder.sample,
        "config": folder.config,
        "numbers": folder.result,
    }
    width = max(map(len, files))
    return "\n".join(
        [
            "",
            "A sample:",
            *(f"  | {line}" for line in result.sample.splitlines()),
            "",
            f"After {result.steps} steps, on held-out data:",
            *numbers,
            f"Baselines: {task.baselines_are}.",
            "",
            "Files:",
            *(f"  {name:<{width}}  {path}" for name, path in files.items() if path is not None),
        ]
    )


def draw_curve(
    path: Path,
    records: Sequence[Mapping[str, Any]],
    task: Task,
    baselines: Mapping[str, float],
) -> None:
    """A PNG of training and held-out loss over steps, and of accuracy if the task is judged by it.

    The baselines are lines.
    """
    # Imported here: it takes seconds, and only one rank draws, once.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    by_loss = task.measure is Measure.LOSS
    figure = Figure(figsize=(8, 5 if by_loss else 8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1 if by_loss else 2, 1, sharex=True, squeeze=False)[:, 0]
    for kind, label, style in (
        ("train", "training loss (one batch)", "-"),
        ("held_out", "held-out loss", "o-"),
    ):
        panels[0].plot(*_points(records, kind, "loss"), style, label=label)
    panels[0].set_ylabel(f"cross-entropy ({task.unit})")
    if not by_loss:
        panels[1].plot(*_points(records, "held_out", "accuracy"), "o-", label="held-out accuracy")
        panels[1].set_ylabel(f"accuracy (part of the {task.item})")
    for (name, value), line in zip(baselines.items(), ("--", ":", "-."), strict=False):
        panels[-1].axhline(value, linestyle=line, color="gray", label=f"{name} {value:.2f}")
    for axes in panels:
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    panels[-1].set_xlabel("step (updates)")
    figure.savefig(path, dpi=120)


def _points(
    records: Sequence[Mapping[str, Any]], kind: str, name: str
) -> tuple[list[int], list[float]]:
    chosen = [record for record in records if record["kind"] == kind and name in record]
    return [record["step"] for record in chosen], [record[name] for record in chosen]

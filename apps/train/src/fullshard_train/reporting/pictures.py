"""The pictures of a run: losses next to the scores of simpler methods, and the speed of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fullshard_train.task import Measure, Task

__all__ = ["draw_losses", "draw_run"]

Records = Sequence[Mapping[str, Any]]


def draw_losses(path: Path, records: Records, task: Task, baselines: Mapping[str, float]) -> None:
    """A PNG of training and held-out loss over steps, and of accuracy if the task is judged by it.

    The baselines are lines.
    """
    by_loss = task.measure is Measure.LOSS
    figure, panels = _panels(1 if by_loss else 2, 1, size=(8, 5 if by_loss else 8))
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
        axes.legend()
    panels[-1].set_xlabel("step (updates)")
    figure.savefig(path, dpi=120)


def draw_run(path: Path, records: Records, task: Task) -> None:
    """A PNG of learning rate, gradient norm, speed and memory over steps.

    And of model FLOPs utilisation, where it is known. A dotted line is where training stood still
    for a checkpoint.
    """
    columns = {
        "learning_rate": "learning rate",
        "gradient_norm": "gradient norm, before clipping",
        "items_per_second": f"{task.item} per second, all ranks",
        "peak_memory_mib": "peak memory (MiB), highest rank",
        "model_flops_utilisation": "model FLOPs utilisation",
    }
    shown = [name for name in columns if _points(records, "train", name)[0]]
    rows = -(-len(shown) // 2)
    figure, panels = _panels(rows, 2, size=(11, 3.2 * rows))
    for axes, name in zip(panels, shown, strict=False):
        axes.plot(*_points(records, "train", name), linewidth=1)
        axes.set_title(columns[name], fontsize="medium")
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        for step, _ in zip(*_points(records, "checkpoint", "pause_seconds"), strict=True):
            axes.axvline(step, linestyle=":", color="gray", alpha=0.6)
    for axes in panels[len(shown) :]:
        axes.set_axis_off()
    figure.supxlabel("step (updates); dotted: a checkpoint", fontsize="medium")
    figure.savefig(path, dpi=120)


def _panels(rows: int, columns: int, *, size: tuple[float, float]) -> tuple[Any, Sequence[Any]]:
    # Imported here: it takes seconds, and only one rank draws, once.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels:
        axes.grid(alpha=0.3)
    return figure, panels


def _points(records: Records, kind: str, name: str) -> tuple[list[int], list[float]]:
    chosen = [record for record in records if record["kind"] == kind and name in record]
    return [record["step"] for record in chosen], [record[name] for record in chosen]
